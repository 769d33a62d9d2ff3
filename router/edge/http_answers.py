"""How answers and errors leave over HTTP: one JSON object, or server-sent events until the end of one side."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.edge.openai.format import AnswerFormat, error_body
from router.edge.sse import SCOPE_KEY, Connection, SseResponse, Turns
from router.requests.answers import Answers
from tandem.errors import TandemError
from tandem.rpc.grpc_errors import retry_after_s


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: TandemError, more_headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(more_headers or {})
    delay_s = retry_after_s(error)
    if delay_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(delay_s)))
    return JsonResponse(error_body(error), status_code=error.wire.http_status, headers=headers)


async def answer(request: Request, answers: Answers, form: AnswerFormat, turns: Turns | None) -> Response:
    """Waits for the first words, so that what fails before them has its own HTTP status. `turns` None: all at once, at
    the end."""
    connection: Connection = request.scope[SCOPE_KEY]
    connection.when_lost(answers.cancel)
    handed_over = False
    try:
        first = await answers.next()
        if turns is not None:
            handed_over = True
            return SseResponse(answers, form, first, turns)
        arrivals = list(first)
        while not answers.ended:
            arrivals.extend(await answers.next())
        return JsonResponse(form.whole(arrivals))
    finally:
        if not handed_over:
            answers.cancel()
            connection.when_lost(None)
