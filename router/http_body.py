"""uvicorn's connection as router.sse writes to it: chunks go into the transport as they would through ASGI's `send`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.sse import SCOPE_KEY


class Body:
    """Puts itself where the request's handler finds it. Head and end of the answer still go through `send`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        cast(dict[str, object], cycle.scope)[SCOPE_KEY] = self
        self._cycle = cycle
        self._write = cycle.transport.write
        self._on_lost: Callable[[], None] | None = None

    def when_lost(self, call: Callable[[], None] | None) -> None:
        self._on_lost = call
        if self._cycle.disconnected:
            self.lost()

    def lost(self) -> None:
        """The connection is gone."""
        if self._on_lost is not None:
            self._on_lost()

    @property
    def write_paused(self) -> bool:
        return self._cycle.flow.write_paused and not self._cycle.disconnected

    async def drained(self) -> None:
        await self._cycle.flow.drain()

    def write_chunk(self, data: bytes) -> None:
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
