"""Typed messages between processes of one worker over a unix socket: a 4-byte length, then a msgspec-encoded struct.

Each end decodes into the tagged union it expects; any other message closes the channel. No pickle. A length over the
limit is refused before memory is allocated.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class ChannelError(Exception):
    """The peer sent an invalid message."""


def encode(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Channel(Generic[T]):
    """One connection. `T` is the union of message types that may arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    def send(self, message: msgspec.Struct) -> None:
        """Queues one message; never waits. A closed channel drops it, and the reader reports the end."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def __aiter__(self) -> AsyncIterator[T]:
        """Messages until the peer closes.

        Raises:
            ChannelError: a message was too long or not of an expected type.
        """
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > MAX_MESSAGE_BYTES:
                    raise ChannelError(f"expected a message of at most {MAX_MESSAGE_BYTES} bytes, got {length}")
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            try:
                yield self._decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ChannelError(f"expected a known message: {error}") from error

    def close(self) -> None:
        self._writer.close()


class ThreadSender:
    """Sends on a connection immediately from another thread than its event loop's.

    The loop's thread might wait for the interpreter lock that a computing thread holds. The loop sends only what the
    socket did not accept.

    Args:
        writer: the connection's writer, of the running loop. It has no other user.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket = writer.get_extra_info("socket").dup()
        self._lock = threading.Lock()
        self._unsent = bytearray()

    def send(self, *messages: msgspec.Struct) -> None:
        """Sends messages; never waits. A closed connection drops them, and the reader reports the end."""
        data = b"".join(encode(message) for message in messages)
        with self._lock:
            loop_sends = bool(self._unsent)
            self._unsent += data
            if not loop_sends:
                self._write()
                if self._unsent:
                    self._loop.call_soon_threadsafe(self._watch)

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken yet."""
        with self._lock:
            return len(self._unsent)

    def close(self) -> None:
        """Call it on the loop. Again: nothing."""
        with self._lock:
            self._unsent.clear()
            if self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket)
                self._socket.close()

    def _watch(self) -> None:
        with self._lock:
            if self._unsent:
                self._loop.add_writer(self._socket, self._go_on)

    def _go_on(self) -> None:
        with self._lock:
            self._write()
            if not self._unsent:
                self._loop.remove_writer(self._socket)

    def _write(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
