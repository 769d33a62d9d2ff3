"""Format of the Responses API: one object, or its events with their sequence numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from router.edge.json_slices import ListMaker, json_pieces, on_demand
from router.edge.openai.answer_schema import ChatTokenLogprob
from router.edge.openai.logprobs import logprob_entries
from router.edge.openai.responses_answer_schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    ReasoningSettings,
    ResponseError,
    ResponseErrorEvent,
    ResponseEvent,
    ResponseObject,
    ResponseStateEvent,
    ResponseStatus,
    ResponseUsage,
)
from router.edge.openai.responses_items import OutputItems
from router.edge.openai.responses_schema import ResponsesRequest
from router.requests.answers import Answers, Arrival, WholeAnswer
from router.requests.output import OutToken, Usage
from tandem.errors import TandemError
from tandem.request import FinishReason


class ResponsesFormat:
    """One answer: one message, or what its parts are if it may have reasoning or calls."""

    def __init__(self, answers: Answers, request: ResponsesRequest) -> None:
        self._answers = answers
        self._request = request
        self._logprobs = request.wants_logprobs
        self._created_at = int(time.time())
        self._sent = 0
        self._reader = answers.reader()
        self._items = OutputItems(answers.request_id, self._reader.call_id, self._logprobs_of)
        self._reason: FinishReason | None = None

    def begin(self) -> Iterator[bytes]:
        response = self._response("in_progress", [])
        yield from self._encoded([ResponseStateEvent(type="response.created", response=response)])
        yield from self._encoded([ResponseStateEvent(type="response.in_progress", response=response)])
        if self._reader.is_plain:
            yield from self._encoded(self._items.open_message())

    def events(self, arrivals: Sequence[Arrival]) -> Iterator[bytes]:
        for arrival in arrivals:
            for piece in arrival.pieces:
                yield from self._encoded(self._items.take(self._reader.feed(piece.text), piece.tokens))
            if arrival.final is not None:
                self._reason = arrival.final.reason
                yield from self._encoded(self._items.take(self._reader.finish()))

    def end(self) -> Iterator[bytes]:
        for event in self._items.end(self._status()):
            yield from self._pieces(event)
        is_complete = self._status() == "completed"
        yield from self._pieces(
            ResponseStateEvent(
                type="response.completed" if is_complete else "response.incomplete", response=self._ended()
            )
        )

    def failed(self, error: TandemError) -> Iterator[bytes]:
        response = self._response("failed", [], error=ResponseError("server_error", error.message))
        yield from self._encoded(
            [
                ResponseErrorEvent(code=error.code.value, message=error.message, param=error.field),
                ResponseStateEvent(type="response.failed", response=response),
            ]
        )

    def whole(self, wholes: Sequence[WholeAnswer]) -> Iterator[bytes]:
        (whole,) = wholes
        self._reason = whole.reason
        read = (self._items.take(self._reader.feed(each.text), each.tokens, on_demand) for each in whole.pieces)
        events = (
            self._items.open_message() if self._reader.is_plain else (),
            *(read if whole.tokens else [self._items.take(self._reader.feed(whole.text))]),
            self._items.take(self._reader.finish()),
            self._items.end(self._status()),
        )
        for _ in chain.from_iterable(events):
            pass  # the events are a stream's
        return json_pieces(self._ended())

    def _status(self) -> ResponseStatus:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _ended(self) -> ResponseObject:
        return self._response(self._status(), self._items.structs(on_demand), _usage(self._answers.usage()))

    def _response(
        self,
        status: ResponseStatus,
        output: list[OutputItem],
        usage: ResponseUsage | None = None,
        error: ResponseError | None = None,
    ) -> ResponseObject:
        request, sampling = self._request, self._answers.submitted[0].request.sampling
        return ResponseObject(
            id=f"resp_{self._answers.request_id}",
            created_at=self._created_at,
            model=self._answers.model.name,
            status=status,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            error=error,
            output=output,
            usage=usage,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=ReasoningSettings(request.effort),
            temperature=sampling.temperature,
            text=_sent(request.text) or {"format": {"type": "text"}},
            tool_choice=_sent(request.tool_choice) or "auto",
            tools=[_sent(tool) for tool in request.tools or ()],
            top_p=sampling.top_p,
            user=request.user,
        )

    def _logprobs_of(self, tokens: Sequence[OutToken], listed: ListMaker) -> list[ChatTokenLogprob]:
        return logprob_entries(self._answers.model.tokenizer, tokens, listed) if self._logprobs else []

    def _encoded(self, events: Iterable[ResponseEvent]) -> Iterator[bytes]:
        for event in events:
            yield b"".join(self._pieces(event))

    def _pieces(self, event: ResponseEvent) -> Iterator[bytes]:
        event.sequence_number = self._sent
        self._sent += 1
        yield b"event: " + event.type.encode() + b"\ndata: "
        yield from json_pieces(event)
        yield b"\n\n"


def _sent(value: Any) -> Any:
    """As the client sent it."""
    return value.model_dump(by_alias=True, exclude_unset=True) if hasattr(value, "model_dump") else value


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
