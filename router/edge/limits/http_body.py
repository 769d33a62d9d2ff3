"""uvicorn's connection as router.edge.sse writes to it: chunks enter the transport as through ASGI's `send`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class Body:
    """Of whichever answer is under way on a connection. Head and end of an answer still go through `send`."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._write = transport.write
        self._flow = flow
        self._on_lost: Callable[[], None] | None = None
        self._is_lost = False

    def when_lost(self, call: Callable[[], None] | None) -> None:
        self._on_lost = call
        if self._is_lost:
            self.lost()

    def lost(self) -> None:
        """The connection is gone."""
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    @property
    def write_paused(self) -> bool:
        return self._flow.write_paused and not self._is_lost

    async def drained(self) -> None:
        await self._flow.drain()

    def write_chunk(self, data: bytes) -> None:
        if not self._is_lost:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
