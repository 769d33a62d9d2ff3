"""A link's connection after the handshake: frames of `kvtransfer.session.piece` in both directions."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

from kvtransfer.causes import protocol_fault
from kvtransfer.connection.tls import TlsConnection, Wire
from kvtransfer.session.piece import HEADER_BYTES, Header
from kvtransfer.versions import PROTOCOL_VERSION

FLUSH_S = 1.0


class FrameStream:
    """`version` is the protocol version of both directions, agreed in the handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.version = PROTOCOL_VERSION
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, raw: Wire) -> FrameStream:
        """Takes the connection over."""
        if isinstance(raw, TlsConnection):
            return cls(raw.reader, raw.writer)
        if raw.family == socket.AF_UNIX:
            return cls(*await asyncio.open_unix_connection(sock=raw))
        return cls(*await asyncio.open_connection(sock=raw))

    def send(self, header: Header, body: bytes = b"") -> None:
        """Queues one frame; never waits. A closed stream drops it, and the reader reports the end."""
        if not self._writer.is_closing():
            self._writer.write(replace(header, body_bytes=len(body)).pack(self.version) + body)

    async def drain(self) -> None:
        await self._writer.drain()

    async def receive(self) -> tuple[Header, bytes] | None:
        """The next frame; None after the peer closed.

        Raises:
            HandoffFault: (protocol) the peer sent an invalid frame.
        """
        try:
            raw = await self._reader.readexactly(HEADER_BYTES)
            header = Header.unpack(raw)
            if raw[0] != self.version:
                raise protocol_fault(f"frame: expected protocol version {self.version}, got {raw[0]}")
            body = await self._reader.readexactly(header.body_bytes) if header.body_bytes else b""
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            return None
        return header, body

    async def frames(self) -> AsyncIterator[tuple[Header, bytes]]:
        while (frame := await self.receive()) is not None:
            yield frame

    def close(self) -> None:
        """Flushes queued frames for at most FLUSH_S, in case the peer stopped reading."""
        self._writer.close()
        asyncio.get_running_loop().call_later(FLUSH_S, self._writer.transport.abort)
