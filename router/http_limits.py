"""Bounds on what HTTP clients may hold before a request of theirs has been parsed."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http_body import attach_body

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
        attach_body(self.cycle)
