"""Frames that wait for a router leave in few messages, in order and whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tandem.v1 import worker_pb2
from worker import waiting_frames
from worker.waiting_frames import messages


def frame(number: int, bytes_: int = 0) -> bytes:
    token = worker_pb2.StepToken(request_id=f"{number}" + "x" * bytes_, token_id=number)
    return worker_pb2.WorkerFrame(tokens=[token]).SerializeToString()


async def sent(frames: Sequence[bytes], *, takes_more: bool = True) -> list[list[int]]:
    """The numbers of the frames in each message, if all wait."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    for each in (*frames, None):
        queue.put_nowait(each)
    parsed = [worker_pb2.WorkerFrame.FromString(each) async for each in messages(queue, takes_more=takes_more)]
    return [[part.tokens[0].token_id for part in (each, *each.more)] for each in parsed]


async def test_all_that_wait_are_one_message_for_a_router_that_takes_it() -> None:
    frames = [frame(number) for number in range(5)]
    assert await sent(frames) == [[0, 1, 2, 3, 4]]
    assert await sent(frames, takes_more=False) == [[0], [1], [2], [3], [4]]
    assert await sent([]) == []


async def test_a_message_has_a_limit_and_a_larger_frame_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_frames, "MESSAGE_BYTES", 500)
    assert await sent([frame(0, 200), frame(1, 200), frame(2, 200), frame(3)]) == [[0, 1], [2, 3]]
    assert await sent([frame(0), frame(1, 900), frame(2), frame(3)]) == [[0], [1], [2, 3]]


async def test_nothing_waits_for_more() -> None:
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    stream = messages(queue, takes_more=True)
    for number in range(3):
        queue.put_nowait(frame(number))
        assert await anext(stream) == frame(number)
    queue.put_nowait(None)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
