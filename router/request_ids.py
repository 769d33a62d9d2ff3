"""Echoes a client's `x-request-id` and W3C `traceparent` and `tracestate` in the answer, over HTTP and gRPC.

An HTTP answer without the client's request id carries the router's. Traces can be found by the client's request id.
tandem/telemetry/trace_context.py also parses the trace context.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.telemetry.log_context import name_logs

HEADER = b"x-request-id"
TRACEPARENT = b"traceparent"
# Only values of these shapes are echoed. https://www.w3.org/TR/trace-context/#traceparent-header
_SHAPES = {
    HEADER: re.compile(rb"[\w.:-]{1,128}", re.ASCII),
    TRACEPARENT: re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"),
    b"tracestate": re.compile(rb"[\x21-\x7e][\x20-\x7e]{0,511}"),
}

_TRACE_ID = slice(3, 35)

Headers = list[tuple[bytes, bytes]]


def new_request_id() -> str:
    return secrets.token_hex(12)


def echoed(given: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers or metadata of a request that its answer repeats; of a repeated name, the first."""
    found: dict[bytes, bytes] = {}
    for name, value in given:
        if (shape := _SHAPES.get(name)) is not None and name not in found and shape.fullmatch(value):
            found[name] = value
    return list(found.items())


def name_request(request_id: str, echo: Headers) -> None:
    """Adds the request id and trace id to the logs of this task. `echo`: the result of `echoed`."""
    name_logs({"request": request_id, **_trace_id(echo)})


def name_call(echo: Headers) -> None:
    """As `name_request`, for a call whose requests have no id yet."""
    if names := _trace_id(echo):
        name_logs(names)


def _trace_id(echo: Headers) -> dict[str, str]:
    given = next((value for name, value in echo if name == TRACEPARENT), None)
    return {} if given is None else {"trace_id": given[_TRACE_ID].decode()}


def trace_id_of(traceparent: bytes | None) -> str:
    """Empty if there is none or it is malformed."""
    return _trace_id(echoed([(TRACEPARENT, traceparent or b"")])).get("trace_id", "")


def client_request_id(given: str | None) -> str:
    """The client's request id; empty if it is missing or malformed."""
    return given if given is not None and _SHAPES[HEADER].fullmatch(given.encode("utf-8", "replace")) else ""


class RequestIds:
    """ASGI middleware: sets `scope["request_id"]` to a new id, and adds the echoed headers to the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope["request_id"] = request_id
        echo = echoed(scope["headers"])
        name_request(request_id, echo)
        if all(name != HEADER for name, _ in echo):
            echo.append((HEADER, request_id.encode()))

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *echo]
            await send(message)

        await self._app(scope, receive, send_with_ids)
