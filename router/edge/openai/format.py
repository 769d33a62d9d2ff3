"""Answers in the OpenAI API's words: whole objects, and the events of a stream (JSON bytes). Pure but for the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from router.edge.openai.logprobs import CompletionLogprobs, Json, chat_logprobs
from router.requests.answers import Answers, Arrival
from router.requests.output import OutToken, TextPiece, Usage
from tandem.errors import TandemError


class AnswerFormat(Protocol):
    """Each method is given every arrival once, in order."""

    def begin(self) -> list[bytes]:
        """Events before the first token."""
        ...

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]: ...

    def end(self) -> list[bytes]:
        """Events after the last answer's end."""
        ...

    def failed(self, error: TandemError) -> list[bytes]:
        """Events instead of all further ones."""
        ...

    def whole(self, arrivals: Sequence[Arrival]) -> Json:
        """All answers as one object."""
        ...


def error_body(error: TandemError) -> Json:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.wire.openai_type,
            "param": error.field,
            "code": error.code.value,
        }
    }


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def server_sent(event: Json) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


DONE = b"data: [DONE]\n\n"
_TEXT = "\x00"
_TEXT_JSON = msgspec.json.encode(_TEXT)


class TextEvents:
    """Events that differ in one text only, which is most of a stream: what is around the text is encoded once."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make` gives the event of a text, which is the last in it that a client can choose."""
        self._before, _, self._after = make(_TEXT).rpartition(_TEXT_JSON)

    def of(self, text: str) -> bytes:
        return self._before + msgspec.json.encode(text) + self._after


def _of(index: int, arrivals: Sequence[Arrival]) -> tuple[list[TextPiece], str | None]:
    """Everything that came of one answer, and its finish reason."""
    own = [arrival for arrival in arrivals if arrival.index == index]
    pieces = [piece for arrival in own for piece in arrival.pieces]
    return pieces, next((arrival.final.reason.value for arrival in own if arrival.final is not None), None)


def tokens_of(pieces: Sequence[TextPiece]) -> list[OutToken]:
    return [token for piece in pieces for token in piece.tokens]


def text_of(pieces: Sequence[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


class ChatFormat:
    def __init__(self, answers: Answers, *, include_usage: bool, logprobs: bool) -> None:
        self._answers = answers
        self._decoder = answers.model.tokenizer
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._head: Json = {
            "id": f"chatcmpl-{answers.request_id}",
            "created": int(time.time()),
            "model": answers.model.name,
        }
        self._texts = [
            TextEvents(lambda text, at=index: self._chunk(at, {"content": text}, None, None))  # type: ignore[misc]
            for index in range(len(answers.submitted))
        ]

    def begin(self) -> list[bytes]:
        first: Json = {"role": "assistant", "content": ""}
        return [self._chunk(index, first, None, None) for index in range(len(self._answers.submitted))]

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]:
        events: list[bytes] = []
        for arrival in arrivals:
            for piece in arrival.pieces:
                if not self._logprobs:
                    if piece.text:
                        events.append(self._texts[arrival.index].of(piece.text))
                    continue
                logprobs = chat_logprobs(self._decoder, piece.tokens)
                if piece.text or (logprobs is not None and logprobs["content"]):
                    events.append(self._chunk(arrival.index, {"content": piece.text}, logprobs, None))
            if arrival.final is not None:
                events.append(self._chunk(arrival.index, {}, None, arrival.final.reason.value))
        return events

    def end(self) -> list[bytes]:
        usage = [self._event([], usage_json(self._answers.usage()))] if self._include_usage else []
        return [*usage, DONE]

    def failed(self, error: TandemError) -> list[bytes]:
        return [server_sent(error_body(error))]

    def whole(self, arrivals: Sequence[Arrival]) -> Json:
        choices = [self._choice(index, arrivals) for index in range(len(self._answers.submitted))]
        usage = usage_json(self._answers.usage())
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, index: int, arrivals: Sequence[Arrival]) -> Json:
        pieces, reason = _of(index, arrivals)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text_of(pieces), "refusal": None},
            "logprobs": chat_logprobs(self._decoder, tokens_of(pieces)) if self._logprobs else None,
            "finish_reason": reason,
        }

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, reason: str | None) -> bytes:
        return self._event([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}], None)

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        event: Json = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._include_usage:
            event["usage"] = usage
        return server_sent(event)


class CompletionFormat:
    """Args:
    echo: with each answer's text, the prompt before it; None: answers only.
    prompt_only: the one token that every request generates is left out.
    """

    def __init__(
        self, answers: Answers, *, include_usage: bool, echo: Sequence[str] | None = None, prompt_only: bool = False
    ) -> None:
        self._answers = answers
        self._include_usage = include_usage
        self._echo = echo
        self._prompt_only = prompt_only
        self._logprobs = [CompletionLogprobs(answers.model.tokenizer) for _ in answers.submitted]
        self._started: set[int] = set()
        self._head: Json = {
            "id": f"cmpl-{answers.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": answers.model.name,
        }
        self._texts = [
            TextEvents(lambda text, at=index: self._event([_choice(at, text, None, None)], None))  # type: ignore[misc]
            for index in range(len(answers.submitted))
        ]

    def begin(self) -> list[bytes]:
        return []

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]:
        events: list[bytes] = []
        for arrival in arrivals:
            for piece in arrival.pieces:
                text, logprobs = self._part(arrival.index, [piece])
                if logprobs is None:
                    if text:
                        events.append(self._texts[arrival.index].of(text))
                else:
                    events.append(self._event([_choice(arrival.index, text, logprobs, None)], None))
            if arrival.final is not None:
                reason = self._reason(arrival.final.reason.value)
                events.append(self._event([_choice(arrival.index, "", None, reason)], None))
        return events

    def end(self) -> list[bytes]:
        return [*([self._event([], self._usage())] if self._include_usage else []), DONE]

    def failed(self, error: TandemError) -> list[bytes]:
        return [server_sent(error_body(error))]

    def whole(self, arrivals: Sequence[Arrival]) -> Json:
        choices: list[Json] = []
        for index in range(len(self._answers.submitted)):
            pieces, reason = _of(index, arrivals)
            choices.append(_choice(index, *self._part(index, pieces), self._reason(reason)))
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _part(self, index: int, pieces: Sequence[TextPiece]) -> tuple[str, Json | None]:
        """Text and logprobs of the next pieces, after the prompt's if these are the first and it is wanted."""
        logprobs = self._logprobs[index]
        text = ""
        if self._echo is not None and index not in self._started:
            self._started.add(index)
            text = self._echo[index]
            each = self._answers.submitted[index]
            if each.request.sampling.prompt_logprobs is not None:
                logprobs.push_prompt(each.request.prompt, each.stream.prompt_scores)
        if not self._prompt_only:
            logprobs.push(tokens_of(pieces))
            text += text_of(pieces)
        return text, logprobs.take()

    def _reason(self, reason: str | None) -> str | None:
        return "length" if self._prompt_only else reason

    def _usage(self) -> Json:
        usage = self._answers.usage()
        if self._prompt_only:
            usage = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage_json(usage)

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        event: Json = {**self._head, "choices": choices}
        if self._include_usage:
            event["usage"] = usage
        return server_sent(event)


def _choice(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
