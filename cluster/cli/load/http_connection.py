"""HTTP/1.1 for the load generator: one request at a time on a kept-alive connection; the body arrives in callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from tandem.errors import UnavailableError

MAX_BODY_BYTES = 64 << 20  # of one response; none of these requests has a larger one


class HttpConnection(asyncio.Protocol):
    """`reusable`: the last response is complete and the server keeps the connection alive."""

    def __init__(self) -> None:
        self.reusable = False
        self.received_any = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._body: Callable[[bytes], None] = _ignore
        self._parser = httptools.HttpResponseParser(self)
        self._received = 0

    def send(self, raw: bytes, on_body: Callable[[bytes], None]) -> asyncio.Future[int]:
        """The future yields the status once the response is complete, or raises UnavailableError."""
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._received = on_body, 0
        self.reusable = self.received_any = False
        if self._transport is None or self._transport.is_closing():
            self._fail("the server closed the connection")
        else:
            self._transport.write(raw)
        return self._done

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    # --- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        self.received_any = True
        self._received += len(data)
        if self._received > MAX_BODY_BYTES:
            self._fail(f"expected a response of at most {MAX_BODY_BYTES} bytes, got more")
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"expected an HTTP/1.1 response: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._fail(f"the connection was lost{f': {error}' if error else ''}")

    # --- httptools -------------------------------------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        self._body(data)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(UnavailableError(why))


def _ignore(data: bytes) -> None:
    """Discards data that arrives before the first request."""
