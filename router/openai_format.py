"""Answers in the OpenAI API's words: whole objects, and the events of a stream (JSON bytes). Pure but for the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.logprobs import CompletionLogprobs, Json, chat_logprobs
from router.output import Final, OutToken, Piece, Usage
from router.service import Submitted


class AnswerFormat(Protocol):
    def begin(self) -> list[bytes]:
        """Events before the first token."""
        ...

    def chunks(self, pieces: Sequence[Piece]) -> list[bytes]: ...

    def end(self, final: Final) -> list[bytes]: ...

    def whole(self, pieces: Sequence[Piece], final: Final) -> Json:
        """The answer as one object."""
        ...


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _tokens(pieces: Sequence[Piece]) -> list[OutToken]:
    return [token for piece in pieces for token in piece.tokens]


class ChatFormat:
    def __init__(self, submitted: Submitted, *, include_usage: bool, logprobs: bool) -> None:
        self._decoder = submitted.model.tokenizer
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._head: Json = {
            "id": f"chatcmpl-{submitted.request.request_id}",
            "created": int(time.time()),
            "model": submitted.model.name,
        }

    def begin(self) -> list[bytes]:
        return [self._chunk({"role": "assistant", "content": ""}, None, None)]

    def chunks(self, pieces: Sequence[Piece]) -> list[bytes]:
        events: list[bytes] = []
        for piece in pieces:
            logprobs = chat_logprobs(self._decoder, piece.tokens) if self._logprobs else None
            if piece.text or (logprobs is not None and logprobs["content"]):
                events.append(self._chunk({"content": piece.text}, logprobs, None))
        return events

    def end(self, final: Final) -> list[bytes]:
        events = [self._chunk({}, None, final.reason.value)]
        if self._include_usage:
            events.append(self._event([], usage_json(final.usage)))
        return events

    def whole(self, pieces: Sequence[Piece], final: Final) -> Json:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": chat_logprobs(self._decoder, _tokens(pieces)) if self._logprobs else None,
            "finish_reason": final.reason.value,
        }
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage_json(final.usage)}

    def _chunk(self, delta: Json, logprobs: Json | None, reason: str | None) -> bytes:
        return self._event([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}], None)

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        event: Json = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._include_usage:
            event["usage"] = usage
        return msgspec.json.encode(event)


class CompletionFormat:
    def __init__(self, submitted: Submitted, *, include_usage: bool) -> None:
        self._logprobs = CompletionLogprobs(submitted.model.tokenizer)
        self._include_usage = include_usage
        self._head: Json = {
            "id": f"cmpl-{submitted.request.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": submitted.model.name,
        }

    def begin(self) -> list[bytes]:
        return []

    def chunks(self, pieces: Sequence[Piece]) -> list[bytes]:
        events: list[bytes] = []
        for piece in pieces:
            logprobs = self._logprobs.take(piece.tokens)
            if piece.text or logprobs is not None:
                events.append(self._event([self._choice(piece.text, logprobs, None)], None))
        return events

    def end(self, final: Final) -> list[bytes]:
        events = [self._event([self._choice("", None, final.reason.value)], None)]
        if self._include_usage:
            events.append(self._event([], usage_json(final.usage)))
        return events

    def whole(self, pieces: Sequence[Piece], final: Final) -> Json:
        text = "".join(piece.text for piece in pieces)
        choice = self._choice(text, self._logprobs.take(_tokens(pieces)), final.reason.value)
        return {**self._head, "choices": [choice], "usage": usage_json(final.usage)}

    def _choice(self, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        event: Json = {**self._head, "choices": choices}
        if self._include_usage:
            event["usage"] = usage
        return msgspec.json.encode(event)
