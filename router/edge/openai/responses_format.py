"""Format of the Responses API: one object, or its events with their sequence numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from router.edge.openai.answer_format import text_of, tokens_of
from router.edge.openai.answer_schema import (
    ChatTokenLogprob,
    ContentPartEvent,
    IncompleteDetails,
    InputTokensDetails,
    OutputItemEvent,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseErrorEvent,
    ResponseEvent,
    ResponseObject,
    ResponseStateEvent,
    ResponseStatus,
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
)
from router.edge.openai.logprobs import logprob_entries
from router.edge.openai.responses_schema import ResponsesRequest
from router.requests.answers import Answers, Arrival
from router.requests.output import TextPiece, Usage
from tandem.errors import TandemError
from tandem.request import FinishReason


class ResponsesFormat:
    """One answer, which is one message of one text part."""

    def __init__(self, answers: Answers, request: ResponsesRequest) -> None:
        self._answers = answers
        self._request = request
        self._logprobs = request.wants_logprobs
        self._item_id = f"msg_{answers.request_id}"
        self._created_at = int(time.time())
        self._sent = 0
        self._pieces: list[TextPiece] = []
        self._reason = FinishReason.STOP

    def begin(self) -> list[bytes]:
        response = self._response("in_progress", [])
        return [
            self._encode(ResponseStateEvent("response.created", self._sent, response)),
            self._encode(ResponseStateEvent("response.in_progress", self._sent, response)),
            self._encode(
                OutputItemEvent(
                    type="response.output_item.added", sequence_number=self._sent, item=self._item("in_progress", [])
                )
            ),
            self._encode(
                ContentPartEvent(
                    type="response.content_part.added",
                    sequence_number=self._sent,
                    item_id=self._item_id,
                    part=OutputText(text="", logprobs=[]),
                )
            ),
        ]

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]:
        self._take(arrivals)
        events: list[bytes] = []
        for arrival in arrivals:
            for piece in arrival.pieces:
                logprobs = self._logprobs_of([piece])
                if piece.text or logprobs:
                    events.append(self._encode(self._delta(piece.text, logprobs)))
        return events

    def end(self) -> list[bytes]:
        text, logprobs = text_of(self._pieces), self._logprobs_of(self._pieces)
        part, response = OutputText(text=text, logprobs=logprobs), self._ended()
        [item] = response.output
        is_complete = response.status == "completed"
        return [
            self._encode(
                TextDoneEvent(sequence_number=self._sent, item_id=self._item_id, text=text, logprobs=logprobs)
            ),
            self._encode(
                ContentPartEvent(
                    type="response.content_part.done", sequence_number=self._sent, item_id=self._item_id, part=part
                )
            ),
            self._encode(OutputItemEvent(type="response.output_item.done", sequence_number=self._sent, item=item)),
            self._encode(
                ResponseStateEvent("response.completed" if is_complete else "response.incomplete", self._sent, response)
            ),
        ]

    def failed(self, error: TandemError) -> list[bytes]:
        response = self._response("failed", [], error=ResponseError("server_error", error.message))
        return [
            self._encode(
                ResponseErrorEvent(
                    sequence_number=self._sent, code=error.code.value, message=error.message, param=error.field
                )
            ),
            self._encode(ResponseStateEvent("response.failed", self._sent, response)),
        ]

    def whole(self, arrivals: Sequence[Arrival]) -> ResponseObject:
        self._take(arrivals)
        return self._ended()

    def _take(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self._pieces += arrival.pieces
            if arrival.final is not None:
                self._reason = arrival.final.reason

    def _ended(self) -> ResponseObject:
        status: ResponseStatus = "completed" if self._reason is FinishReason.STOP else "incomplete"
        part = OutputText(text=text_of(self._pieces), logprobs=self._logprobs_of(self._pieces))
        return self._response(status, [self._item(status, [part])], _usage(self._answers.usage()))

    def _response(
        self,
        status: ResponseStatus,
        output: list[OutputMessage],
        usage: ResponseUsage | None = None,
        error: ResponseError | None = None,
    ) -> ResponseObject:
        request = self._request
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
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
        )

    def _item(self, status: ResponseStatus, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=content)

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> TextDeltaEvent:
        return TextDeltaEvent(sequence_number=self._sent, item_id=self._item_id, delta=text, logprobs=logprobs)

    def _logprobs_of(self, pieces: Sequence[TextPiece]) -> list[ChatTokenLogprob]:
        return logprob_entries(self._answers.model.tokenizer, tokens_of(pieces)) if self._logprobs else []

    def _encode(self, event: ResponseEvent) -> bytes:
        self._sent += 1
        return b"event: " + event.type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
