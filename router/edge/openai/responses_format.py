"""Answers in the words of the OpenAI Responses API: one object, or its events with their sequence numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from router.edge.openai.format import text_of, tokens_of
from router.edge.openai.logprobs import Json, logprob_entries
from router.edge.openai.responses_schema import ResponsesRequest
from router.requests.answers import Answers, Arrival
from router.requests.output import TextPiece, Usage
from tandem.errors import TandemError
from tandem.request import FinishReason


class ResponsesFormat:
    """One answer, which is one message of one text part."""

    def __init__(self, answers: Answers, request: ResponsesRequest) -> None:
        self._answers = answers
        self._logprobs = request.wants_logprobs
        self._item_id = f"msg_{answers.request_id}"
        self._sequence = 0
        self._pieces: list[TextPiece] = []
        self._reason = FinishReason.STOP
        self._head: Json = {
            "id": f"resp_{answers.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answers.model.name,
            "error": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def begin(self) -> list[bytes]:
        response = self._response("in_progress", [], None)
        item = {**self._item("in_progress"), "content": []}
        return [
            self._event("created", response=response),
            self._event("in_progress", response=response),
            self._event("output_item.added", output_index=0, item=item),
            self._part_event("content_part.added", part=_part("", [])),
        ]

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]:
        self._take(arrivals)
        return [
            self._part_event("output_text.delta", delta=piece.text, logprobs=self._logprobs_of([piece]))
            for arrival in arrivals
            for piece in arrival.pieces
            if piece.text or self._logprobs_of([piece])
        ]

    def end(self) -> list[bytes]:
        text, logprobs = text_of(self._pieces), self._logprobs_of(self._pieces)
        response = self._ended()
        return [
            self._part_event("output_text.done", text=text, logprobs=logprobs),
            self._part_event("content_part.done", part=_part(text, logprobs)),
            self._event("output_item.done", output_index=0, item=self._item(str(response["status"]))),
            self._event(str(response["status"]), response=response),
        ]

    def failed(self, error: TandemError) -> list[bytes]:
        told = {"code": error.code.value, "message": error.message}
        response = {**self._response("failed", [], None), "error": {"code": "server_error", "message": error.message}}
        return [
            self._send("error", {**told, "param": error.field}),
            self._event("failed", response=response),
        ]

    def whole(self, arrivals: Sequence[Arrival]) -> Json:
        self._take(arrivals)
        return self._ended()

    def _take(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self._pieces += arrival.pieces
            if arrival.final is not None:
                self._reason = arrival.final.reason

    def _ended(self) -> Json:
        status = "completed" if self._reason is FinishReason.STOP else "incomplete"
        return self._response(status, [self._item(status)], self._answers.usage())

    def _response(self, status: str, output: list[Json], usage: Usage | None) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = None if usage is None else _usage(usage)
        return {**self._head, "status": status, "incomplete_details": cut, "output": output, "usage": told}

    def _item(self, status: str) -> Json:
        content = [_part(text_of(self._pieces), self._logprobs_of(self._pieces))]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _logprobs_of(self, pieces: Sequence[TextPiece]) -> list[Json]:
        return logprob_entries(self._answers.model.tokenizer, tokens_of(pieces)) if self._logprobs else []

    def _part_event(self, name: str, **fields: object) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, name: str, **fields: object) -> bytes:
        return self._send(f"response.{name}", fields)

    def _send(self, kind: str, fields: Json) -> bytes:
        event = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n"


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
