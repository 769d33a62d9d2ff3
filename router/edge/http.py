"""The HTTP edge: OpenAI's APIs and Anthropic's, with health, readiness and metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from router.auth.call import Call
from router.auth.http_gate import HttpGate, call_of, note_error
from router.auth.web_pages import WebPages
from router.edge.anthropic.answer_schema import TokenCount
from router.edge.anthropic.messages_errors import is_messages_path, messages_error
from router.edge.anthropic.messages_format import MessagesFormat
from router.edge.anthropic.messages_schema import CountTokensRequest, MessagesRequest
from router.edge.http_bodies import HttpBodies
from router.edge.json_slices import JsonSlices, json_pieces
from router.edge.keyed_http import REPLAYED, Handler, answer_once
from router.edge.limits.bodies import LARGEST_BODIES, BodyBudget
from router.edge.limits.http import SCOPE_KEY
from router.edge.openai.answer_format import AnswerFormat, ChatFormat, CompletionFormat, error_body
from router.edge.openai.answer_schema import (
    AnswerStruct,
    DetokenizeAnswer,
    ErrorBody,
    ErrorDetail,
    ModelCard,
    ModelList,
    StatusAnswer,
    TokenizeAnswer,
    TokenizerInfo,
)
from router.edge.openai.embeddings import (
    Embedded,
    EmbeddingRequest,
    EmbeddingUsage,
    RerankRequest,
    ScoreRequest,
    embedding_list,
    ranked_list,
    score_list,
    vectors,
)
from router.edge.openai.request_schema import ChatCompletionRequest, CompletionRequest
from router.edge.openai.responses_format import ResponsesFormat
from router.edge.openai.responses_schema import ResponsesRequest
from router.edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from router.edge.openapi import openapi_document
from router.edge.sse import Connection, SseResponse, WriteBatcher
from router.edge.write_pauses import WritePauses
from router.idempotency.keyed_answers import HEADER, KeyedAnswers
from router.request_ids import RequestIds
from router.request_terms import RequestTerms
from router.requests.answers import Answers
from router.requests.raw_request import RawRequest, renamed
from router.requests.serving_model import ServingModel
from router.service import RouterService
from tandem.config.router import IdempotencySpec
from tandem.errors import InputError, InternalError, RequestCancelled, TandemError
from tandem.rpc.grpc_errors import retry_after_s

OnError = Callable[[Request, Exception], Awaitable[Response]]
Embeds = TypeVar("Embeds", EmbeddingRequest, ScoreRequest, RerankRequest)
EMBEDDED_AT_ONCE = 64  # texts of one call on workers or in the queue
MAX_RETRY_AFTER_S = 60  # OpenAI's clients ignore longer ones
INLINE_ANSWER_CHARS = 4096  # longer answers are read for calls and reasoning in a thread: about 1 µs per character
_STATUS_ERRORS = {
    404: "no such path",
    405: "method not allowed here",
    415: "expected a body without content-encoding; send it uncompressed",
}


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: AnswerStruct) -> bytes:
        return msgspec.json.encode(content)


class HttpEdge:
    """The handlers; `app` makes them an application."""

    def __init__(
        self,
        service: RouterService,
        *,
        max_body_bytes: int,
        bodies: BodyBudget | None = None,
        keyed: KeyedAnswers | None = None,
        more_routes: Sequence[Route] = (),
        cors_origins: Sequence[str] = (),
        pauses: WritePauses | None = None,
        pages: WebPages | None = None,
    ) -> None:
        """`more_routes`: routes beside the inference API, such as the dashboard's. `cors_origins`: of web pages whose
        scripts may read answers. `pages` None: of any web page it accepts what it accepts of others."""
        self._service = service
        self._bodies = HttpBodies(service, max_body_bytes, bodies or BodyBudget(LARGEST_BODIES * max_body_bytes))
        self._keyed = keyed or KeyedAnswers(IdempotencySpec())
        self._more_routes = more_routes
        self._cors_origins = cors_origins
        self._pages = pages
        self._batcher = WriteBatcher(pauses)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self._once(self.chat), methods=["POST"]),
            Route("/v1/completions", self._once(self.completions), methods=["POST"]),
            Route("/v1/responses", self._once(self.responses), methods=["POST"]),
            Route("/v1/messages", self._once(self.messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/embeddings", self._once(self.embeddings), methods=["POST"]),
            Route("/v1/score", self._once(self.score), methods=["POST"]),
            Route("/v1/rerank", self._once(self.rerank), methods=["POST"]),
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
        on_error: dict[Any, OnError] = {
            TandemError: _on_tandem_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        }
        routes = [*self.routes(), *self._more_routes]
        HttpGate(self._service.calls).guard(routes)
        app = Starlette(routes=routes, exception_handlers=on_error)
        app.router.redirect_slashes = False  # a path has one spelling
        guarded = RequestIds(app if self._pages is None else self._pages.kept_from(app, _on_tandem_error))
        if not self._cors_origins:
            return guarded
        return CORSMiddleware(
            guarded,
            allow_origins=self._cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )

    async def chat(self, request: Request) -> Response:
        terms = self._service.terms(request.headers.get, call=call_of(request.scope))
        parsed, raw = await self._bodies.parsed(request, ChatCompletionRequest, ChatCompletionRequest.parse)
        answers = await self._submitted(request, [raw], parsed.n or 1, terms)
        form = ChatFormat(answers, usage=parsed.usage, logprobs=bool(parsed.logprobs))
        return await self._answer(request, answers, form, is_streamed=bool(parsed.stream))

    async def completions(self, request: Request) -> Response:
        terms = self._service.terms(request.headers.get, call=call_of(request.scope))
        parsed, raws = await self._bodies.parsed(request, CompletionRequest, CompletionRequest.parse)
        answers = await self._submitted(request, raws, parsed.n or 1, terms)
        form = CompletionFormat(answers, usage=parsed.usage, prompt_only=parsed.is_prompt_only)
        return await self._answer(request, answers, form, is_streamed=bool(parsed.stream))

    async def responses(self, request: Request) -> Response:
        terms = self._service.terms(request.headers.get, call=call_of(request.scope))
        parsed, raw = await self._bodies.parsed(request, ResponsesRequest, ResponsesRequest.parse)
        answers = await self._submitted(request, [raw], 1, terms)
        form = ResponsesFormat(answers, parsed)
        return await self._answer(request, answers, form, is_streamed=bool(parsed.stream))

    async def messages(self, request: Request) -> Response:
        terms = self._service.terms(request.headers.get, call=call_of(request.scope))
        parsed, raw = await self._bodies.parsed(request, MessagesRequest, MessagesRequest.parse)
        answers = await self._submitted(request, [raw], 1, terms)
        form = MessagesFormat(answers, parsed)
        return await self._answer(request, answers, form, is_streamed=bool(parsed.stream))

    async def embeddings(self, request: Request) -> Response:
        parsed, found = await self._embedded(request, EmbeddingRequest)
        return JsonSlices(json_pieces(embedding_list(parsed, found)), self._service.executor)

    async def score(self, request: Request) -> Response:
        parsed, found = await self._embedded(request, ScoreRequest)
        return JsonSlices(json_pieces(score_list(parsed, found)), self._service.executor)

    async def rerank(self, request: Request) -> Response:
        parsed, found = await self._embedded(request, RerankRequest)
        return JsonSlices(json_pieces(ranked_list(parsed, found)), self._service.executor)

    async def _submitted(
        self, request: Request, raws: Sequence[RawRequest], choices: int, terms: RequestTerms
    ) -> Answers:
        with _ended_by_its_client(request):
            return await self._service.submit_all(raws, choices, request.scope["request_id"], terms)

    async def _embedded(self, request: Request, kind: type[Embeds]) -> tuple[Embeds, Embedded]:
        """The body, and the embeddings of its texts, some at a time."""
        call, answer_id = call_of(request.scope), request.scope["request_id"]
        terms = self._service.terms(request.headers.get, call=call)
        parsed, raws = await self._bodies.parsed(request, kind, kind.parse)
        with self._service.rejections_of(parsed.model):
            model = self._service.models.find(parsed.model, call)
            parsed.check_size(model.hidden_size)
        connection: Connection = request.scope[SCOPE_KEY]
        found: list[bytes] = []
        tokens = 0
        parts = self._service.submit_in_parts(raws, parsed.fields, EMBEDDED_AT_ONCE, answer_id, terms)
        async with aclosing(parts):
            async for answers in parts:
                connection.when_lost(answers.cancel)
                try:
                    await answers.collect()
                except InputError as error:  # of a text that no worker could hold
                    raise renamed(error, parsed.fields[len(found) + (answers.failed or 0)]) from None
                finally:
                    answers.cancel()
                    connection.when_lost(None)
                found += [each.stream.embedding for each in answers.submitted]
                tokens += answers.prompt_tokens
        made = partial(vectors, found, parsed.dimensions)
        rows = await asyncio.get_running_loop().run_in_executor(self._service.executor, made)
        return parsed, Embedded(answer_id, model.name, rows, EmbeddingUsage(tokens, tokens))

    async def count_tokens(self, request: Request) -> Response:
        self._service.take_request(call_of(request.scope))
        parsed, chat = await self._bodies.parsed(request, CountTokensRequest, CountTokensRequest.chat)
        with _ended_by_its_client(request):
            _, tokens = await self._service.tokenize(parsed.model, chat, call_of(request.scope))
        return JsonResponse(TokenCount(len(tokens)))

    async def tokenize(self, request: Request) -> Response:
        self._service.take_request(call_of(request.scope))
        parsed, prompt = await self._bodies.parsed(request, TokenizeRequest, TokenizeRequest.parse)
        special = parsed.add_special_tokens is not False
        call = call_of(request.scope)
        with _ended_by_its_client(request):
            model, tokens = await self._service.tokenize(parsed.model, prompt, call, special_tokens=special)
        return JsonResponse(TokenizeAnswer(len(tokens), model.max_model_tokens, tokens))

    async def detokenize(self, request: Request) -> Response:
        self._service.take_request(call_of(request.scope))
        parsed, tokens = await self._bodies.parsed(request, DetokenizeRequest, attrgetter("tokens"))
        text = await self._service.detokenize(parsed.model, tokens, call_of(request.scope))
        return JsonResponse(DetokenizeAnswer(text))

    async def tokenizer_info(self, request: Request) -> Response:
        name = request.query_params.get("model", "")
        model = self._service.models.find(name, call_of(request.scope), required=False)
        return JsonResponse(msgspec.convert(model.tokenizer_info(), TokenizerInfo))

    async def openapi(self, request: Request) -> Response:
        return Response(_openapi_json(), media_type="application/json")

    async def models(self, request: Request) -> Response:
        call = call_of(request.scope)
        models = self._service.models.usable_by(call)
        return JsonResponse(ModelList(data=[self._card(model, call) for model in models.values()]))

    async def model(self, request: Request) -> Response:
        call = call_of(request.scope)
        model = self._service.models.find(request.path_params["name"], call)
        return JsonResponse(self._card(model, call))

    async def health(self, request: Request) -> Response:
        return JsonResponse(StatusAnswer("ok"))

    async def ready(self, request: Request) -> Response:
        ready = self._service.ready
        return JsonResponse(StatusAnswer("ready" if ready else "not ready"), status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    def _once(self, handler: Handler) -> Handler:
        """The handler of a route whose clients may repeat a request under an idempotency key."""

        async def answer(request: Request) -> Response:
            if HEADER not in request.headers:
                return await handler(request)
            return await answer_once(request, self._bodies.whole, handler, self._keyed, self._service)

        return answer

    def _card(self, model: ServingModel, call: Call | None) -> ModelCard:
        return ModelCard(
            id=model.name,
            max_model_len=model.max_model_tokens,
            input_modalities=self._service.models.input_modalities(model),
            parent=self._service.models.parent(model, call) or msgspec.UNSET,
        )

    async def _answer(self, request: Request, answers: Answers, form: AnswerFormat, *, is_streamed: bool) -> Response:
        """Waits for the first token of a stream, so that a failure before it gets its own HTTP status. Otherwise waits
        for all answers."""
        connection: Connection = request.scope[SCOPE_KEY]
        connection.when_lost(answers.cancel)
        executor, handed_over = self._service.executor, False
        try:
            if is_streamed:
                first = await answers.next()
                handed_over = True
                return SseResponse(answers, form, first, self._batcher, executor)
            wholes = await answers.collect()

            def made() -> Response:
                return JsonSlices(form.whole(wholes), executor)

            if answers.are_plain or sum(whole.chars for whole in wholes) <= INLINE_ANSWER_CHARS:
                return made()
            return await asyncio.get_running_loop().run_in_executor(executor, made)
        finally:
            if not handed_over:
                answers.cancel()
                connection.when_lost(None)


@cache
def _openapi_json() -> bytes:
    return msgspec.json.encode(openapi_document())


def _error_response(request: Request, error: TandemError, more_headers: Mapping[str, str]) -> Response:
    headers = dict(more_headers)
    delay_s = retry_after_s(error)
    if delay_s is not None:
        headers["retry-after"] = str(min(max(1, math.ceil(delay_s)), MAX_RETRY_AFTER_S))
    return _error_json(request, error.wire.http_status, error_body(error), headers)


def _error_json(request: Request, status: int, error: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    """In the shape of the API that the path belongs to."""
    body: AnswerStruct = error
    if is_messages_path(request.url.path):
        body = messages_error(status, error.error.message, request.scope["request_id"])
    return JsonResponse(body, status_code=status, headers=headers)


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, TandemError):
        raise error
    replayed = {REPLAYED: "true"} if request.scope.get(REPLAYED) else {}
    return _error_response(request, error, note_error(request.scope, error) | replayed)


@contextmanager
def _ended_by_its_client(request: Request) -> Iterator[None]:
    """A client that leaves ends what is awaited here: reading images takes long. Raises ClientDisconnect then."""
    connection: Connection = request.scope[SCOPE_KEY]
    task = asyncio.current_task()
    has_left = is_awaited = False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        if is_awaited and task is not None:
            task.cancel()

    try:
        connection.when_lost(leave)
        if has_left:
            raise ClientDisconnect
        is_awaited = True
        yield
    except asyncio.CancelledError:
        if not has_left or task is None or task.uncancel():
            raise
        raise ClientDisconnect from None
    finally:
        connection.when_lost(None)


async def _on_http_error(request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    text = f"{request.method} {request.url.path}: {_STATUS_ERRORS.get(status, 'refused')}"
    return _error_json(request, status, ErrorBody(ErrorDetail(text, "invalid_request_error", None, None)), headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    note_error(request.scope, RequestCancelled("the client closed the connection"))
    return Response(status_code=499)  # for the log: the connection is closed


async def _on_bug(request: Request, error: Exception) -> Response:
    note_error(request.scope, InternalError("internal error"))
    return _error_json(request, 500, ErrorBody(ErrorDetail("internal error", "server_error", None, "internal")))
