"""The OpenAI-compatible HTTP edge, with health, readiness and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from router.auth.http_gate import HttpGate, call_of, note_error
from router.edge.fast_routes import FastRoutes, OnError
from router.edge.http_answers import JsonResponse, answer, error_response
from router.edge.limits.http import protocol, sweep_forever
from router.edge.openai.format import ChatFormat, CompletionFormat
from router.edge.openai.openapi import openapi_document
from router.edge.openai.responses_format import ResponsesFormat
from router.edge.openai.responses_schema import ResponsesRequest
from router.edge.openai.schema import ChatCompletionRequest, CompletionRequest, parse_body
from router.edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from router.edge.sse import Turns
from router.edge.tls import HANDSHAKE_TIMEOUT_S, EdgeTls
from router.request_ids import RequestIds
from router.requests.answers import Answers
from router.requests.request import RawRequest
from router.service import RouterService
from tandem.errors import InputError, InternalError, PayloadTooLarge, PortInUse, RequestCancelled, TandemError

Parsed = TypeVar("Parsed")
Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)

INLINE_BODY_BYTES = 64 << 10  # longer bodies are parsed in a thread
_STATUS_ERRORS = {404: "no such path", 405: "method not allowed here"}


class HttpEdge:
    """The handlers. Made into an application by `app`."""

    def __init__(self, service: RouterService, *, max_body_bytes: int, more_routes: Sequence[Route] = ()) -> None:
        """`more_routes`: not of the inference API (the dashboard's)."""
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._more_routes = more_routes
        self._turns = Turns()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    def app(self) -> ASGIApp:
        on_error: dict[type[Exception], OnError] = {
            TandemError: _on_tandem_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        }
        hot = {"/v1/chat/completions": self.chat, "/v1/completions": self.completions}
        routes, gate = [*self.routes(), *self._more_routes], HttpGate(self._service.calls)
        gate.guard(routes)
        app = Starlette(routes=routes, exception_handlers=on_error)
        app.router.redirect_slashes = False  # a path has one spelling
        return RequestIds(FastRoutes(app, hot, on_error, gate))

    async def chat(self, request: Request) -> Response:
        terms = self._service.terms(request.headers.get, call=call_of(request.scope))
        parsed = await self._body(request, lambda body: parse_body(ChatCompletionRequest, body))
        raw = self._counted(parsed.model, parsed.parse)
        answers = await self._service.submit_all([raw], parsed.n or 1, request.scope["request_id"], terms)
        form = ChatFormat(answers, include_usage=parsed.include_usage, logprobs=bool(parsed.logprobs))
        return await answer(request, answers, form, self._turns if parsed.stream else None)

    async def completions(self, request: Request) -> Response:
        terms = self._service.terms(request.headers.get, call=call_of(request.scope))
        parsed = await self._body(request, lambda body: parse_body(CompletionRequest, body))
        raws = self._counted(parsed.model, parsed.parse)
        answers = await self._service.submit_all(raws, parsed.n or 1, request.scope["request_id"], terms)
        form = CompletionFormat(
            answers,
            include_usage=parsed.include_usage,
            echo=_prompt_texts(raws, answers) if parsed.echo else None,
            prompt_only=parsed.is_prompt_only,
        )
        return await answer(request, answers, form, self._turns if parsed.stream else None)

    async def responses(self, request: Request) -> Response:
        terms = self._service.terms(request.headers.get, call=call_of(request.scope))
        parsed = await self._body(request, lambda body: parse_body(ResponsesRequest, body))
        raw = self._counted(parsed.model, parsed.parse)
        answers = await self._service.submit_all([raw], 1, request.scope["request_id"], terms)
        return await answer(request, answers, ResponsesFormat(answers, parsed), self._turns if parsed.stream else None)

    async def tokenize(self, request: Request) -> Response:
        parsed = await self._body(request, lambda body: parse_body(TokenizeRequest, body))
        special = parsed.add_special_tokens is not False
        call = call_of(request.scope)
        model, tokens = await self._service.tokenize(parsed.model, parsed.parse(), call, special_tokens=special)
        return JsonResponse({"count": len(tokens), "max_model_len": model.max_model_tokens, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        parsed = await self._body(request, lambda body: parse_body(DetokenizeRequest, body))
        text = await self._service.detokenize(parsed.model, parsed.tokens, call_of(request.scope))
        return JsonResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        name = request.query_params.get("model", "")
        model = self._service.model(name, call_of(request.scope), required=False)
        return JsonResponse(model.tokenizer_info())

    async def openapi(self, request: Request) -> Response:
        return JsonResponse(openapi_document())

    async def models(self, request: Request) -> Response:
        models = self._service.models_for(call_of(request.scope))
        return JsonResponse({"object": "list", "data": [self._card(name) for name in models]})

    async def model(self, request: Request) -> Response:
        return JsonResponse(self._card(self._service.model(request.path_params["name"], call_of(request.scope)).name))

    async def health(self, request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        ready = self._service.ready
        return JsonResponse({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)

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

    async def _body(self, request: Request, parse: Callable[[bytes], Body]) -> Body:
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
                parsed = parse(bytes(body))
            else:  # few threads: each keeps some of the memory that its largest body took
                parsed = await asyncio.get_running_loop().run_in_executor(self._service.executor, parse, bytes(body))
        except InputError as error:
            self._service.rejected("", error)
            raise
        if (call := call_of(request.scope)) is not None:
            call.asks(parsed.model)
        return parsed


def _prompt_texts(raws: Sequence[RawRequest], answers: Answers) -> list[str]:
    """For each answer the text of its prompt, as the client wrote it."""
    tokenizer = answers.model.tokenizer
    texts = [
        raw.prompt if isinstance(raw.prompt, str) else tokenizer.decode(first.request.prompt, skip_special_tokens=False)
        for raw, first in zip(raws, answers.submitted[:: len(answers.submitted) // len(raws)], strict=True)
    ]
    return [text for text in texts for _ in range(len(answers.submitted) // len(raws))]


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, TandemError):
        raise error
    return error_response(error, note_error(request.scope, error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"{request.method} {request.url.path}: {_STATUS_ERRORS.get(status, 'refused')}"
    body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}
    return JsonResponse(body, status_code=status)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    note_error(request.scope, RequestCancelled("the client went away"))
    return Response(status_code=499)  # nobody reads it


async def _on_bug(request: Request, error: Exception) -> Response:
    note_error(request.scope, InternalError("internal error"))
    body = {"error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}}
    return JsonResponse(body, status_code=500)


class _Server(uvicorn.Server):
    """The process has its own signal handlers. Ends without uvicorn's fixed waits of 0.1 s each."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit_asked = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._exit_asked.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        for tenth in itertools.cycle(range(10)):  # of a second, which `on_tick` counts
            if await self.on_tick(tenth):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._exit_asked.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110  # uvicorn offers no event
                    await asyncio.sleep(0.01)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in state.tasks:
                task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """With TLS, uvicorn would wait a minute for who begins no handshake."""
        config, state = self.config, self.server_state
        if config.ssl is None:
            await super().startup(sockets)
            return

        protocol_class: Any = config.http_protocol_class
        connect = partial(protocol_class, config=config, server_state=state, app_state={})
        listen = partial(asyncio.get_running_loop().create_server, connect, backlog=config.backlog, ssl=config.ssl)
        self.servers = [await listen(sock=sock, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S) for sock in sockets or []]
        self.started = True


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
    def __init__(
        self,
        edge: HttpEdge,
        sock: socket.socket,
        *,
        max_connections: int,
        client_timeout_s: float,
        keep_alive_s: float,
        tls: EdgeTls | None = None,
    ) -> None:
        config = uvicorn.Config(
            edge.app(),
            http=protocol(max_connections=max_connections, client_timeout_s=client_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # a float is as good
            timeout_graceful_shutdown=5,
        )
        config.load()
        if tls is not None:
            config.ssl = tls.http_context  # uvicorn's own way knows no renewal
        self._server = _Server(config)
        self._tls = tls
        self._sock = sock
        self._task: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        self._sweeper = asyncio.create_task(sweep_forever(self._server.server_state.connections), name="http-sweeper")
        if self._tls is not None:
            self._refresher = asyncio.create_task(self._tls.refresh_forever(), name="http-certificates")
        while not self._server.started and not self._task.done():  # noqa: ASYNC110  # uvicorn offers no event
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._server.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        for task in (self._sweeper, self._refresher):
            if task is not None:
                task.cancel()
        self._sock.close()
