"""Echoes `x-request-id` and W3C `traceparent` with `tracestate` in the answers, over HTTP and gRPC. If a client sends
no request id, the HTTP answer has that of the router.

A client finds its trace by its own request id. tandem/telemetry/trace_context.py reads the trace context.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.requests.request import new_request_id
from tandem.telemetry.log_context import name_logs

HEADER = b"x-request-id"
TRACEPARENT = b"traceparent"
# Values of another shape are not echoed. https://www.w3.org/TR/trace-context/#traceparent-header
_SHAPES = {
    HEADER: re.compile(rb"[\w.:-]{1,128}", re.ASCII),
    TRACEPARENT: re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"),
    b"tracestate": re.compile(rb"[\x21-\x7e][\x20-\x7e]{0,511}"),
}

_TRACE_ID = slice(3, 35)

Headers = list[tuple[bytes, bytes]]


def echoed(given: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers or metadata of a request that go into its answer; the first of each name."""
    found: dict[bytes, bytes] = {}
    for name, value in given:
        if (shape := _SHAPES.get(name)) is not None and name not in found and shape.fullmatch(value):
            found[name] = value
    return list(found.items())


def name_request(request_id: str, shown: Headers) -> None:
    """Adds the id to the logs of the task that serves the request. `shown`: the result of `echoed`."""
    name_logs({"request": request_id, **_trace_id(shown)})


def name_call(shown: Headers) -> None:
    """As `name_request`, for a call whose requests have no id yet."""
    if names := _trace_id(shown):
        name_logs(names)


def _trace_id(shown: Headers) -> dict[str, str]:
    given = next((value for name, value in shown if name == TRACEPARENT), None)
    return {} if given is None else {"trace_id": given[_TRACE_ID].decode()}


def trace_id_of(traceparent: bytes | None) -> str:
    """Empty if there is none."""
    return _trace_id(echoed([(TRACEPARENT, traceparent or b"")])).get("trace_id", "")


def client_request_id(given: str | None) -> str:
    """The request id that a client sent; empty if there is none or it has another shape."""
    return given if given is not None and _SHAPES[HEADER].fullmatch(given.encode("utf-8", "replace")) else ""


class RequestIds:
    """Puts the id that the router made into `scope["request_id"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ours = new_request_id()
        scope["request_id"] = ours
        shown = echoed(scope["headers"])
        name_request(ours, shown)
        if all(name != HEADER for name, _ in shown):
            shown.append((HEADER, ours.encode()))

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *shown]
            await send(message)

        await self._app(scope, receive, send_with_ids)
