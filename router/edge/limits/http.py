"""Limits of the HTTP edge: connections, headers, and how long a client may keep the router waiting."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Set
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

SCOPE_KEY = "tandem.connection"  # of the ChunkedBody in the scope of a request
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 128
SPARE_FILES = 256  # for everything except clients
SWEEP_S = 0.5
_SWEEP_BATCH = 512  # connections; then the event loop handles requests
_CLOSE = b"connection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSE
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n" + _CLOSE
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSE


def raise_file_limit() -> int:
    """Raises the limit of open files of this process, and of those that it starts, to its maximum. Returns that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_for(wanted: int) -> int:
    """Raises the limit of open files. Returns how many of the `wanted` connections it allows on each of two ports."""
    hard = raise_file_limit()
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, (hard - SPARE_FILES) // 2))


class ChunkedBody:
    """The body of the answer in progress on a connection, for router.edge.sse. Chunks go straight to the transport; the
    head and the end of an answer still go through ASGI's `send`."""

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
        """The connection is closed."""
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


class LimitedHttpProtocol(HttpToolsProtocol):
    """httptools itself waits without limit and takes header lines of any length. `sweep` closes the connection of a
    client that keeps the router waiting: for the rest of a request, or to read an answer."""

    max_connections = 1 << 16
    client_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        self._header_bytes: int | None = None  # received so far; None: not in headers
        self._headers = 0
        self._request_began_s: float | None = self.loop.time()  # None: the request is complete
        self._body = ChunkedBody(transport, self.flow)
        self._unread_since_s: float | None = None  # the client leaves unread what we sent; None: it reads
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
        self._request_began_s = self.loop.time()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._refuse(_TOO_LARGE)
            raise OverflowError  # stops the parser before it begins the request
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # else the connection has been refused already
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        super().on_headers_complete()
        # One body per connection: one per request would refer to the scope, and keep the request until a collection.
        cast(dict[str, object], self.scope)[SCOPE_KEY] = self._body

    def on_message_complete(self) -> None:
        self._request_began_s = None
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # a large body has paused it, which hides that the client leaves

    def pause_writing(self) -> None:
        self._unread_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since_s = None
        super().resume_writing()

    def sweep(self, now_s: float) -> None:
        """Closes the connection if the client has exceeded `client_timeout_s`."""
        if self.transport.is_closing() and self._unread_since_s is None:
            self._unread_since_s = now_s  # the connection stays open until the client has read the rest
        if self._unread_since_s is not None and now_s - self._unread_since_s > self.client_timeout_s:
            self.transport.abort()
        elif self.transport.is_closing() or self._request_began_s is None:
            pass
        elif self.flow.read_paused:
            self._request_began_s = now_s  # the router does not read, so the client is not late
        elif now_s - self._request_began_s > self.client_timeout_s:
            self._refuse(_TOO_LATE if self._may_answer() else b"")

    def _may_answer(self) -> bool:
        """No answer is in progress, and the one that is due has not begun."""
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
            try:
                each.sweep(now_s)
            except Exception:  # of one connection: the others' clients may be late, too
                log.exception("a connection's time could not be checked")
            if number % _SWEEP_BATCH == 0:
                await asyncio.sleep(0)
