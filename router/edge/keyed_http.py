"""HTTP requests with an idempotency key: each client reads the answer from its log, which one detached run writes.

The run is the ordinary handler, with a log in place of the client's connection. It does not end with the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.auth.http_gate import call_of, note_error
from router.edge.limits.http import SCOPE_KEY
from router.edge.sse import Connection, SseResponse
from router.idempotency.answer_log import AnswerLog, Head, LogReader
from router.idempotency.identity import keyed_request
from router.idempotency.keyed_answers import KeyedAnswers
from router.idempotency.keyed_metrics import Api
from router.service import RouterService
from tandem.errors import RequestCancelled, TandemError

REPLAYED = "idempotency-replayed"  # a header, and in the scope of a request whose answer has it

Handler = Callable[[Request], Awaitable[Response]]
ReceiveBody = Callable[[Request], Awaitable[bytes]]


async def answer_once(
    request: Request, receive: ReceiveBody, handler: Handler, answers: KeyedAnswers, service: RouterService
) -> Response:
    """The answer of `handler` to this request, or to the first one with its key. Raises as `receive` and `handler`,
    and as `RouterService.take_keyed_request`, `keyed_request` and `KeyedAnswers.read`."""
    call = call_of(request.scope)
    service.take_keyed_request(call)
    reader = _reader(request, await receive(request), handler, answers, service)
    connection: Connection = request.scope[SCOPE_KEY]
    connection.when_lost(reader.lost)
    handed_over = False
    try:
        if reader.is_repeat:
            request.scope[REPLAYED] = True
        elif call is not None:
            call.is_detached = True
        first = await reader.next()
        handed_over = True
        return _LogResponse(reader, first)
    finally:
        if reader.log.is_replayed:
            request.scope[REPLAYED] = True
        if not handed_over:
            reader.close()
            connection.when_lost(None)


def _reader(
    request: Request, body: bytes, handler: Handler, answers: KeyedAnswers, service: RouterService
) -> LogReader:
    """Only a run holds the body: repeats, which may wait for long, have given theirs back to the budget."""
    call = call_of(request.scope)
    method = f"{request.method} {request.url.path}"
    asked = keyed_request(service.cluster, request.headers.get, call, method, body, Api.HTTP)

    async def produce(log: AnswerLog) -> TandemError | None:
        return await _run(request, body, handler, log)

    def on_end(raised: TandemError | None) -> None:
        """Ends the call of the first client with its run."""
        if raised is not None:
            note_error(request.scope, raised)
        if call is not None:
            service.calls.finish(call)

    return answers.read(asked, produce, on_end)


async def _run(request: Request, body: bytes, handler: Handler, log: AnswerLog) -> TandemError | None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            log.head = Head(message["status"], tuple(message["headers"]))
        elif chunk := message.get("body", b""):
            log.append(chunk)
            await log.room()

    scope = {**request.scope, SCOPE_KEY: _LogConnection(log)}
    response = await handler(Request(scope, receive))
    await response(scope, receive, send)
    return response.failure if isinstance(response, SseResponse) else None


class _LogConnection:
    """The Connection of a run."""

    def __init__(self, log: AnswerLog) -> None:
        self._log = log

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Never: a run that no client waits for is cancelled."""

    @property
    def write_paused(self) -> bool:
        return self._log.is_full

    async def drained(self) -> None:
        await self._log.room()

    def write_chunk(self, data: bytes) -> None:
        self._log.append(data)


class _LogResponse(Response):
    """`first` has been read already, so that a failure before it gets its own HTTP status."""

    def __init__(self, reader: LogReader, first: list[bytes]) -> None:
        self._reader = reader
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope[SCOPE_KEY]
        try:
            await self._send_all(scope, send)
        except RequestCancelled as error:  # the client is gone
            note_error(scope, error)
        finally:
            self._reader.close()
            connection.when_lost(None)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        head = self._reader.log.head
        if head is None:
            raise RuntimeError("the answer has no head")
        more = [(REPLAYED.encode(), b"true")] if scope.get(REPLAYED) else []
        await send({"type": "http.response.start", "status": head.status, "headers": [*head.headers, *more]})
        chunks = self._first
        while chunks:
            await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
            chunks = await self._reader.next()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
