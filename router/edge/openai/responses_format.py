"""Format of the Responses API: one object, or its events with their sequence numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from router.edge.json_slices import ListMaker, at_once, json_pieces, on_demand
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
from router.requests.answers import Answers, Arrival, WholeAnswer
from router.requests.output import OutToken, Usage
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
        self._whole = WholeAnswer()

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

    def events(self, arrivals: Sequence[Arrival]) -> Iterator[bytes]:
        for arrival in arrivals:
            self._whole.add(arrival)
            for piece in arrival.pieces:
                logprobs = self._logprobs_of(piece.tokens)
                if piece.text or logprobs:
                    yield self._encode(self._delta(piece.text, logprobs))

    def end(self) -> Iterator[bytes]:
        response = self._ended(self._whole)
        [item] = response.output
        [part] = item.content
        is_complete = response.status == "completed"
        done = TextDoneEvent(sequence_number=self._sent, item_id=self._item_id, text=part.text, logprobs=part.logprobs)
        yield from self._pieces(done)
        yield from self._pieces(
            ContentPartEvent(
                type="response.content_part.done", sequence_number=self._sent, item_id=self._item_id, part=part
            )
        )
        yield from self._pieces(
            OutputItemEvent(type="response.output_item.done", sequence_number=self._sent, item=item)
        )
        yield from self._pieces(
            ResponseStateEvent("response.completed" if is_complete else "response.incomplete", self._sent, response)
        )

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

    def whole(self, wholes: Sequence[WholeAnswer]) -> Iterator[bytes]:
        return json_pieces(self._ended(wholes[0]))

    def _ended(self, whole: WholeAnswer) -> ResponseObject:
        status: ResponseStatus = "incomplete" if whole.reason is FinishReason.LENGTH else "completed"
        part = OutputText(text=whole.text, logprobs=self._logprobs_of(whole.tokens, on_demand))
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

    def _logprobs_of(self, tokens: Sequence[OutToken], listed: ListMaker = at_once) -> list[ChatTokenLogprob]:
        return logprob_entries(self._answers.model.tokenizer, tokens, listed) if self._logprobs else []

    def _encode(self, event: ResponseEvent) -> bytes:
        return b"".join(self._pieces(event))

    def _pieces(self, event: ResponseEvent) -> Iterator[bytes]:
        self._sent += 1
        yield b"event: " + event.type.encode() + b"\ndata: "
        yield from json_pieces(event)
        yield b"\n\n"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
