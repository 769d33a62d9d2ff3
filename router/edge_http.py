"""The OpenAI-compatible HTTP edge, with health, readiness and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.http_limits import MAX_CONNECTIONS, LimitedHttpProtocol
from router.openai_format import AnswerFormat, ChatFormat, CompletionFormat
from router.openai_schema import ChatCompletionRequest, CompletionRequest, parse_body
from router.output import Piece, ResponseStream
from router.service import RouterService, Submitted
from tandem.errors import ErrorCode, InputError, PayloadTooLarge, PortInUse, RequestCancelled, TandemError
from tandem.grpc_errors import retry_after_s

Parsed = TypeVar("Parsed")

INLINE_BODY_BYTES = 64 << 10  # longer bodies are parsed in a thread
_STATUS_ERRORS = {404: "no such path", 405: "method not allowed here"}


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


def error_body(error: TandemError) -> dict[str, object]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.wire.openai_type,
            "param": error.field,
            "code": error.code.value,
        }
    }


def error_response(error: TandemError) -> Response:
    headers: dict[str, str] = {}
    delay_s = retry_after_s(error)
    if delay_s is not None:
        headers["retry-after"] = str(max(1, round(delay_s)))
    return JsonResponse(error_body(error), status_code=error.wire.http_status, headers=headers)


class HttpEdge:
    """The handlers. Made into an application by `app`."""

    def __init__(self, service: RouterService, *, max_body_bytes: int) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.model, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/ready", self.ready, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
            ],
            exception_handlers={
                TandemError: _on_tandem_error,
                HTTPException: _on_http_error,
                ClientDisconnect: _on_disconnect,
                Exception: _on_bug,
            },
        )

    async def chat(self, request: Request) -> Response:
        parsed = await self._body(request, lambda body: parse_body(ChatCompletionRequest, body))
        submitted = await self._service.submit(self._counted(parsed.model, parsed.parse))
        answer = ChatFormat(submitted, include_usage=parsed.include_usage, logprobs=bool(parsed.logprobs))
        return await self._answer(request, submitted, answer, stream=bool(parsed.stream))

    async def completions(self, request: Request) -> Response:
        parsed = await self._body(request, lambda body: parse_body(CompletionRequest, body))
        submitted = await self._service.submit(self._counted(parsed.model, parsed.parse))
        answer = CompletionFormat(submitted, include_usage=parsed.include_usage)
        return await self._answer(request, submitted, answer, stream=bool(parsed.stream))

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._card(name) for name in self._service.models]})

    async def model(self, request: Request) -> Response:
        return JsonResponse(self._card(self._service.model(request.path_params["name"]).name))

    async def health(self, request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        ready = self._service.ready
        return JsonResponse({"status": "ready" if ready else "no decode worker"}, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    def _card(self, name: str) -> dict[str, object]:
        model = self._service.models[name]
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "tandem",
            "max_model_len": model.max_model_tokens,
        }

    def _counted(self, model: str, parse: Callable[[], Parsed]) -> Parsed:
        try:
            return parse()
        except InputError as error:
            self._service.rejected(model, error)
            raise

    async def _body(self, request: Request, parse: Callable[[bytes], Parsed]) -> Parsed:
        """The parsed body, within the size limit. Raises InputError."""
        limit = self._max_body_bytes
        declared = request.headers.get("content-length", "")
        body = bytearray()
        too_large = declared.isdecimal() and int(declared) > limit
        if not too_large:
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    too_large = True
                    break
        try:
            if too_large:
                raise PayloadTooLarge(f"body: expected at most {limit} bytes; send less")
            if len(body) <= INLINE_BODY_BYTES:
                return parse(bytes(body))
            return await asyncio.to_thread(parse, bytes(body))
        except InputError as error:
            self._service.rejected("", error)
            raise

    async def _answer(self, request: Request, submitted: Submitted, answer: AnswerFormat, *, stream: bool) -> Response:
        """Waits for the first words, so that what fails before them has its own HTTP status."""
        watch = asyncio.create_task(_cancel_on_disconnect(request, submitted.stream))
        handed_over = False
        pieces = aiter(submitted.stream)
        try:
            first = await anext(pieces, None)
            if stream:
                handed_over = True
                return SseResponse(submitted.stream, answer, first, watch)
            parts = list(first or ())
            async for more in submitted.stream:
                parts.extend(more)
            final = submitted.stream.final
            if final is None:
                raise RequestCancelled("the request ended without an answer")
            return JsonResponse(answer.whole(parts, final), headers=_headers(submitted.stream))
        finally:
            if not handed_over:
                submitted.stream.cancel()
                watch.cancel()


class SseResponse(Response):
    """Server-sent events until the stream's end or the client's."""

    def __init__(
        self, stream: ResponseStream, answer: AnswerFormat, first: list[Piece] | None, watch: asyncio.Task[None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **_headers(stream)}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._stream = stream
        self._answer = answer
        self._first = first
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send(send, self._answer.begin() + self._answer.chunks(self._first or []))
                async for pieces in self._stream:
                    await self._send(send, self._answer.chunks(pieces))
                if self._stream.final is not None:
                    await self._send(send, [*self._answer.end(self._stream.final), b"[DONE]"])
            except TandemError as error:
                if error.code is not ErrorCode.CANCELLED:
                    await self._send(send, [msgspec.json.encode(error_body(error))])
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._stream.cancel()
            self._watch.cancel()

    async def _send(self, send: Send, events: list[bytes]) -> None:
        if events:
            body = b"".join(b"data: " + event + b"\n\n" for event in events)
            await send({"type": "http.response.body", "body": body, "more_body": True})


def _headers(stream: ResponseStream) -> dict[str, str]:
    return {"x-request-id": stream.request_id}


async def _cancel_on_disconnect(request: Request, stream: ResponseStream) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, TandemError):
        raise error
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"{request.method} {request.url.path}: {_STATUS_ERRORS.get(status, 'refused')}"
    body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}
    return JsonResponse(body, status_code=status)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(request: Request, error: Exception) -> Response:
    body = {"error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}}
    return JsonResponse(body, status_code=500)


class _Server(uvicorn.Server):
    """The process has its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Raises PortInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise PortInUse(
            f"router.http_port: cannot listen on {host}:{port} ({error.strerror}); free it or choose another port",
            field="router.http_port",
        ) from None
    sock.setblocking(False)
    return sock


class HttpServer:
    def __init__(self, edge: HttpEdge, sock: socket.socket) -> None:
        config = uvicorn.Config(
            edge.app(),
            http=LimitedHttpProtocol,
            limit_concurrency=MAX_CONNECTIONS,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        while not self._server.started and not self._task.done():  # noqa: ASYNC110  # uvicorn offers no event
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._sock.close()
