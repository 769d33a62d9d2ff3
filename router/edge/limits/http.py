"""Bounds on what HTTP clients may hold, and for how long they may keep the router waiting."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Set
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.edge.limits.http_body import Body
from router.edge.sse import SCOPE_KEY

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 128
SPARE_FILES = 256  # for everything but clients
SWEEP_S = 0.5
_SWEPT_AT_ONCE = 512  # then requests have their turn
_CLOSE = b"connection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSE
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n" + _CLOSE
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSE


def connections_for(wanted: int) -> int:
    """Raises this process's limit of open files as far as it may be, and says for how many of `wanted` connections it
    is enough, on each of two ports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, (hard - SPARE_FILES) // 2))


class LimitedHttpProtocol(HttpToolsProtocol):
    """httptools waits for ever and takes header lines of any length. `overdue` cuts off who keeps us waiting: for the
    rest of a request, or to take what is sent."""

    max_connections = 1 << 16
    client_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class has it
        super().connection_made(transport)
        self._header_bytes: int | None = None  # so far; None: not in headers
        self._headers = 0
        self._asked_since_s: float | None = self.loop.time()  # for the rest of a request; None: it is complete
        self._body = Body(transport, self.flow)
        self._unread_since_s: float | None = None  # they leave unread what we sent; None: they do not
        if len(self.connections) > self.max_connections:
            self._refuse(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._body.lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._header_bytes is None:
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._header_bytes = self._headers = 0
        self._asked_since_s = self.loop.time()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._refuse(_TOO_LARGE)
            raise OverflowError  # ends the parser, which would go on to the request itself
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # they were told what is wrong
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        super().on_headers_complete()
        # Not one for each request: that would lead back to its scope, and keep all of the request for the collector.
        cast(dict[str, object], self.scope)[SCOPE_KEY] = self._body

    def on_message_complete(self) -> None:
        self._asked_since_s = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._unread_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since_s = None
        super().resume_writing()

    def sweep(self, now_s: float) -> None:
        """Cuts off who has kept us waiting for too long."""
        if self.transport.is_closing() and self._unread_since_s is None:
            self._unread_since_s = now_s  # it stays open until they have read the rest
        if self._unread_since_s is not None and now_s - self._unread_since_s > self.client_timeout_s:
            self.transport.abort()
        elif self.transport.is_closing() or self._asked_since_s is None:
            pass
        elif self.flow.read_paused:
            self._asked_since_s = now_s  # it is we who do not read
        elif now_s - self._asked_since_s > self.client_timeout_s:
            self._refuse(_TOO_LATE if self._may_speak() else b"")

    def _may_speak(self) -> bool:
        """No answer is on its way, and the one that is due has not been given."""
        if self.cycle is None:
            return True
        return bool(self.cycle.response_complete if self._header_bytes is not None else not self.cycle.response_started)

    def _refuse(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


def protocol(*, max_connections: int, client_timeout_s: float) -> type[LimitedHttpProtocol]:
    return type("Protocol", (LimitedHttpProtocol,), {
        "max_connections": max_connections, "client_timeout_s": client_timeout_s,
    })  # fmt: skip


async def sweep_forever(connections: Set[Any]) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        now_s = asyncio.get_running_loop().time()
        for number, each in enumerate(list(connections)):
            each.sweep(now_s)
            if number % _SWEPT_AT_ONCE == 0:
                await asyncio.sleep(0)
