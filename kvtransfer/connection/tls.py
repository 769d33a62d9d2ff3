"""Mutual TLS 1.3 for the TCP connections of the KV plane."""

from __future__ import annotations

import asyncio
import socket

from tandem.rpc.tls import TlsContexts

HANDSHAKE_TIMEOUT_S = 5.0


class TlsConnection:
    """A connection after its TLS handshake and before its first frame. Used in place of a plain socket."""

    family = socket.AF_INET

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, raw: socket.socket, contexts: TlsContexts) -> TlsConnection:
        """Takes the socket over. Raises OSError (including ssl.SSLError)."""
        opening = asyncio.open_connection(
            sock=raw, ssl=contexts.client, server_hostname="", ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
        return cls(*await opening)._of_peer(contexts)

    @classmethod
    async def accept(cls, raw: socket.socket, contexts: TlsContexts) -> TlsConnection:
        """Takes the socket over. Raises OSError (including ssl.SSLError) if it is not TLS or not from one of our
        peers."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, raw, ssl=contexts.server, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))._of_peer(contexts)

    def _of_peer(self, contexts: TlsContexts) -> TlsConnection:
        try:
            contexts.check_peer(self.writer.get_extra_info("ssl_object"))
        except OSError:
            self.writer.close()
            raise
        return self

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, size: int) -> bytes:
        return await self.reader.read(size)

    def close(self) -> None:
        self.writer.close()


Wire = socket.socket | TlsConnection
"""A connection before its first frame."""
