"""How answers and errors leave over HTTP: one JSON object, or server-sent events until the end of one side."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answers import Answers, Arrival
from router.openai_format import AnswerFormat, error_body
from tandem.errors import ErrorCode, TandemError
from tandem.grpc_errors import retry_after_s


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: TandemError) -> Response:
    headers: dict[str, str] = {}
    delay_s = retry_after_s(error)
    if delay_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(delay_s)))
    return JsonResponse(error_body(error), status_code=error.wire.http_status, headers=headers)


async def answer(request: Request, answers: Answers, form: AnswerFormat, *, stream: bool) -> Response:
    """Waits for the first words, so that what fails before them has its own HTTP status."""
    watch = asyncio.create_task(_cancel_on_disconnect(request, answers))
    handed_over = False
    arriving = aiter(answers)
    try:
        first = await anext(arriving)
        if stream:
            handed_over = True
            return SseResponse(answers, form, first, arriving, watch)
        arrivals = list(first)
        async for more in arriving:
            arrivals.extend(more)
        return JsonResponse(form.whole(arrivals))
    finally:
        if not handed_over:
            answers.cancel()
            watch.cancel()


class SseResponse(Response):
    def __init__(
        self,
        answers: Answers,
        form: AnswerFormat,
        first: list[Arrival],
        rest: AsyncIterator[list[Arrival]],
        watch: asyncio.Task[None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answers = answers
        self._form = form
        self._first = first
        self._rest = rest
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await _send(send, self._form.begin() + self._form.events(self._first))
                async for arrivals in self._rest:
                    await _send(send, self._form.events(arrivals))
                await _send(send, self._form.end())
            except TandemError as error:
                if error.code is not ErrorCode.CANCELLED:
                    await _send(send, self._form.failed(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answers.cancel()
            self._watch.cancel()


async def _send(send: Send, events: list[bytes]) -> None:
    if events:
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})


async def _cancel_on_disconnect(request: Request, answers: Answers) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answers.cancel()
