"""The frames for one router that wait until it reads, in few messages: however small one is, a busy router reads one in
each turn of its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tandem.rpc.wire_format import message_field
from tandem.v1 import worker_pb2

MESSAGE_BYTES = 256 << 10  # a larger frame is a message of its own


async def messages(frames: asyncio.Queue[bytes | None], *, takes_more: bool) -> AsyncIterator[bytes]:
    """Serialized WorkerFrames, until None: each with those behind it that have room."""
    following: bytes | None = None
    ended = False
    while not ended:
        first = await frames.get() if following is None else following
        following = None
        if first is None:
            return
        parts, room_bytes = [first], MESSAGE_BYTES - len(first)
        while takes_more and not frames.empty():
            frame = frames.get_nowait()
            if frame is None:
                ended = True
                break
            if len(frame) > room_bytes:
                following = frame
                break
            parts.append(message_field(worker_pb2.WorkerFrame.MORE_FIELD_NUMBER, frame))
            room_bytes -= len(parts[-1])
        yield b"".join(parts)
