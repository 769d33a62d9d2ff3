"""Bounds on what HTTP clients may hold before a request of theirs has been parsed."""

from __future__ import annotations

from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.sse import SCOPE_KEY

MAX_CONNECTIONS = 8192
MAX_HEADER_BYTES = 64 << 10
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class LimitedHttpProtocol(HttpToolsProtocol):
    """httptools takes header lines of any length; this refuses headers that are not complete in time."""

    _in_headers = False
    _header_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._header_bytes = self._header_bytes + len(data) if self._in_headers else 0
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(_REFUSAL)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()
        cast(dict[str, object], self.cycle.scope)[SCOPE_KEY] = _Body(self.cycle)


class _Body:
    """router.sse.Connection: chunks go into the transport as uvicorn's `send` would write them."""

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
