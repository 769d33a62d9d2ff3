"""uvicorn's connection as router.sse writes to it: chunks go into the transport as they would through ASGI's `send`."""

from __future__ import annotations

from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.sse import SCOPE_KEY


def attach_body(cycle: RequestResponseCycle) -> None:
    """Puts it where the request's handler finds it. Head and end of the answer still go through `send`."""
    cast(dict[str, object], cycle.scope)[SCOPE_KEY] = _Body(cycle)


class _Body:
    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write

    @property
    def write_paused(self) -> bool:
        return self._cycle.flow.write_paused and not self._cycle.disconnected

    async def drained(self) -> None:
        await self._cycle.flow.drain()

    def write_chunk(self, data: bytes) -> None:
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
