"""Bodies of HTTP requests: received within the limits, and parsed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from router.auth.http_gate import call_of, caller_of
from router.edge.anthropic.messages_schema import CountTokensRequest, MessagesRequest
from router.edge.body_parsing import parse_body
from router.edge.limits.bodies import EXEMPT_BYTES, BodyBudget
from router.edge.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from router.edge.openai.request_schema import ChatCompletionRequest, CompletionRequest
from router.edge.openai.responses_schema import ResponsesRequest
from router.edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from router.request_terms import TENANT
from router.service import RouterService
from tandem.errors import InputError, OverloadedError, PayloadTooLarge, TandemError

Parsed = TypeVar("Parsed")
AnyBody = (
    ChatCompletionRequest
    | CompletionRequest
    | ResponsesRequest
    | MessagesRequest
    | CountTokensRequest
    | TokenizeRequest
    | DetokenizeRequest
    | EmbeddingRequest
    | ScoreRequest
    | RerankRequest
)
Body = TypeVar("Body", bound=AnyBody)


class HttpBodies:
    def __init__(self, service: RouterService, max_body_bytes: int, budget: BodyBudget) -> None:
        """`budget`: of all bodies that are being received."""
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._budget = budget

    async def parsed(self, request: Request, kind: type[Body], parse: Callable[[Body], Parsed]) -> tuple[Body, Parsed]:
        """The body, within the size limit, and what `parse` makes of it: both in a thread if it is large. Raises
        InputError."""

        def both(body: bytes) -> tuple[Body, Parsed | InputError]:
            parsed = parse_body(kind, body)
            try:
                return parsed, parse(parsed)
            except InputError as error:  # of a request whose model is known
                return parsed, error.with_traceback(None)

        body, counted = await self._receive(request)
        try:
            with self._service.rejections_of("", OverloadedError):
                parsed, made = await self._service.threads.parse(_tenant(request), len(body), partial(both, body))
        finally:
            self._budget.give_back(caller_of(request.scope), counted)
        if (call := call_of(request.scope)) is not None:
            call.name_model(parsed.model)
        if isinstance(made, InputError):
            self._service.rejected(parsed.model, made)
            try:
                raise made
            finally:
                del made  # its traceback holds this frame: a reference cycle
        return parsed, made

    async def whole(self, request: Request) -> bytes:
        """The body, for a handler that counts it again. Raises InputError, OverloadedError."""
        body, counted = await self._receive(request)
        self._budget.give_back(caller_of(request.scope), counted)
        return body

    async def _receive(self, request: Request) -> tuple[bytes, int]:
        """The body, and how much of it to give back to the budget. Raises InputError, OverloadedError."""
        if (request.headers.get("content-encoding") or "identity").lower() != "identity":
            raise HTTPException(415)
        body = bytearray()
        caller, counted = caller_of(request.scope), 0
        try:
            async with aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if (more := max(0, len(body) - EXEMPT_BYTES) - counted) > 0:
                        self._budget.take(caller, more)
                        counted += more
        except BaseException as error:
            self._budget.give_back(caller, counted)
            if isinstance(error, TandemError):
                self._service.rejected("", error)
            raise
        return bytes(body), counted

    async def _chunks(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Raises PayloadTooLarge as soon as the body is known to be."""
        limit, declared = self._max_body_bytes, request.headers.get("content-length", "")
        received = 0
        is_too_large = declared.isdecimal() and int(declared) > limit
        if not is_too_large:
            async for chunk in request.stream():
                received += len(chunk)
                is_too_large = received > limit
                if is_too_large:
                    break
                yield chunk
        if is_too_large:
            raise PayloadTooLarge(f"body: expected at most {limit} bytes; send less")


def _tenant(request: Request) -> str:
    """That of the key; without keys the one that the client claims."""
    call = call_of(request.scope)
    return request.headers.get(TENANT, "") if call is None else call.tenant
