"""`x-request-id` and W3C `traceparent`: what a client sends of them comes back with its answer, over HTTP and gRPC.

They are for the client's own books and go no further. Every HTTP answer has a request id: ours, where none came.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.request import new_request_id

HEADER = b"x-request-id"
# Anything of another shape is not repeated. https://www.w3.org/TR/trace-context/#traceparent-header
_SHAPES = {
    HEADER: re.compile(rb"[\w.:-]{1,128}", re.ASCII),
    b"traceparent": re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"),
}

_TRACE_ID = slice(3, 35)

Headers = list[tuple[bytes, bytes]]


def echoed(given: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What of a request's headers or metadata goes into the answer's; the first of each name."""
    found: dict[bytes, bytes] = {}
    for name, value in given:
        if (shape := _SHAPES.get(name)) is not None and name not in found and shape.fullmatch(value):
            found[name] = value
    return list(found.items())


def trace_id_of(traceparent: bytes | None) -> str:
    """Empty: there is none."""
    shown = echoed([(b"traceparent", traceparent or b"")])
    return shown[0][1][_TRACE_ID].decode() if shown else ""


class RequestIds:
    """Puts the id that we made into `scope["request_id"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ours = new_request_id()
        scope["request_id"] = ours
        shown = echoed(scope["headers"])
        if all(name != HEADER for name, _ in shown):
            shown.append((HEADER, ours.encode()))

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *shown]
            await send(message)

        await self._app(scope, receive, send_with_ids)
