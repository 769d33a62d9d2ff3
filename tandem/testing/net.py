"""A faulty network for tests: a TCP proxy that can be cut or made silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpProxy:
    """Forwards connections to what `connect` opens.

    When cut, it resets existing and new connections. When silent, it accepts connections and bytes but forwards
    nothing.
    """

    def __init__(self, connect: Callable[[], Awaitable[Streams]]) -> None:
        self.port = 0
        self._connect = connect
        self._is_cut = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        self._is_cut = True
        self._reset()

    def silence(self) -> None:
        self._flows.clear()

    def heal(self) -> None:
        """Resets connections that were silent, like a host whose timeout expired."""
        if not self._flows.is_set():
            self._reset()
        self._is_cut = False
        self._flows.set()

    def _reset(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self._is_cut:
                return
            far_reader, far_writer = await self._connect()
            self._open.add(far_writer)
            try:
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._forward(reader, far_writer))
                    ways.create_task(self._forward(far_reader, writer))
            finally:
                self._open.discard(far_writer)
                far_writer.transport.abort()
        except* OSError:
            pass  # when one side ends, both do
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._flows.wait()
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError("the source closed")


@asynccontextmanager
async def tcp_proxy(connect: Callable[[], Awaitable[Streams]]) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(connect)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.heal()
        proxy.cut()
