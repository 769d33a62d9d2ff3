"""Formats of the chat completions and completions APIs: a whole answer as a struct, or the events of a stream as JSON.
Pure except for the time of creation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from router.edge.openai.answer_schema import (
    AnswerStruct,
    AssistantMessage,
    CachedTokens,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChunkChoice,
    ChunkDelta,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionUsage,
    ErrorBody,
    ErrorDetail,
)
from router.edge.openai.logprobs import CompletionLogprobsBuilder, chat_logprobs
from router.requests.answers import Answers, Arrival
from router.requests.output import OutToken, TextPiece, Usage
from tandem.errors import TandemError
from tandem.request import FinishReason


class AnswerFormat(Protocol):
    """Each method is given every arrival once, in order."""

    def begin(self) -> list[bytes]:
        """Events before the first token."""
        ...

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]: ...

    def end(self) -> list[bytes]:
        """Events after the end of the last answer."""
        ...

    def failed(self, error: TandemError) -> list[bytes]:
        """Events instead of all further ones."""
        ...

    def whole(self, arrivals: Sequence[Arrival]) -> AnswerStruct:
        """All answers as one object."""
        ...


def error_body(error: TandemError) -> ErrorBody:
    return ErrorBody(ErrorDetail(error.message, error.wire.openai_type, error.field, error.code.value))


def completion_usage(usage: Usage) -> CompletionUsage:
    total_tokens = usage.prompt_tokens + usage.completion_tokens
    details = CachedTokens(usage.cached_tokens)
    return CompletionUsage(usage.prompt_tokens, usage.completion_tokens, total_tokens, details)


def server_sent(event: AnswerStruct) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


DONE = b"data: [DONE]\n\n"
_TEXT = "\x00"
_TEXT_JSON = msgspec.json.encode(_TEXT)


class TextEventTemplate:
    """Makes events that differ in one text only, which are most of a stream. The JSON around the text is encoded
    once."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make` gives the event of a text. The text is the last value in the event that a client can choose."""
        self._before, _, self._after = make(_TEXT).rpartition(_TEXT_JSON)

    def fill(self, text: str) -> bytes:
        return self._before + msgspec.json.encode(text) + self._after


def _choice_of(index: int, arrivals: Sequence[Arrival]) -> tuple[list[TextPiece], FinishReason | None]:
    """All pieces of one choice, and its finish reason."""
    chosen = [arrival for arrival in arrivals if arrival.index == index]
    pieces = [piece for arrival in chosen for piece in arrival.pieces]
    return pieces, next((arrival.final.reason for arrival in chosen if arrival.final is not None), None)


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
        self._id = f"chatcmpl-{answers.request_id}"
        self._created = int(time.time())
        self._texts = [
            TextEventTemplate(lambda text, at=index: self._chunk(at, ChunkDelta(content=text)))  # type: ignore[misc]
            for index in range(len(answers.submitted))
        ]

    def begin(self) -> list[bytes]:
        first = ChunkDelta(role="assistant", content="")
        return [self._chunk(index, first) for index in range(len(self._answers.submitted))]

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]:
        events: list[bytes] = []
        for arrival in arrivals:
            for piece in arrival.pieces:
                if not self._logprobs:
                    if piece.text:
                        events.append(self._texts[arrival.index].fill(piece.text))
                    continue
                logprobs = chat_logprobs(self._decoder, piece.tokens)
                if piece.text or (logprobs is not None and logprobs.content):
                    events.append(self._chunk(arrival.index, ChunkDelta(content=piece.text), logprobs))
            if arrival.final is not None:
                events.append(self._chunk(arrival.index, ChunkDelta(), None, arrival.final.reason))
        return events

    def end(self) -> list[bytes]:
        usage = [self._event([], completion_usage(self._answers.usage()))] if self._include_usage else []
        return [*usage, DONE]

    def failed(self, error: TandemError) -> list[bytes]:
        return [server_sent(error_body(error))]

    def whole(self, arrivals: Sequence[Arrival]) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._answers.model.name,
            choices=[self._choice(index, arrivals) for index in range(len(self._answers.submitted))],
            usage=completion_usage(self._answers.usage()),
        )

    def _choice(self, index: int, arrivals: Sequence[Arrival]) -> ChatChoice:
        pieces, reason = _choice_of(index, arrivals)
        logprobs = chat_logprobs(self._decoder, tokens_of(pieces)) if self._logprobs else None
        return ChatChoice(index, AssistantMessage(content=text_of(pieces)), logprobs, reason)

    def _chunk(
        self, index: int, delta: ChunkDelta, logprobs: ChatLogprobs | None = None, reason: FinishReason | None = None
    ) -> bytes:
        return self._event([ChunkChoice(index, delta, logprobs, reason)], None if self._include_usage else UNSET)

    def _event(self, choices: list[ChunkChoice], usage: CompletionUsage | UnsetType | None) -> bytes:
        model = self._answers.model.name
        return server_sent(
            ChatCompletionChunk(id=self._id, created=self._created, model=model, choices=choices, usage=usage)
        )


class CompletionFormat:
    """Args:
    echo: for each answer the text of its prompt, which goes before it; None: answers only.
    prompt_only: leaves out the one token that every request generates.
    """

    def __init__(
        self, answers: Answers, *, include_usage: bool, echo: Sequence[str] | None = None, prompt_only: bool = False
    ) -> None:
        self._answers = answers
        self._include_usage = include_usage
        self._echo = echo
        self._prompt_only = prompt_only
        self._logprobs = [CompletionLogprobsBuilder(answers.model.tokenizer) for _ in answers.submitted]
        self._started: set[int] = set()
        self._id = f"cmpl-{answers.request_id}"
        self._created = int(time.time())
        self._texts = [
            TextEventTemplate(lambda text, at=index: self._chunk(at, text))  # type: ignore[misc]
            for index in range(len(answers.submitted))
        ]

    def begin(self) -> list[bytes]:
        return []

    def events(self, arrivals: Sequence[Arrival]) -> list[bytes]:
        events: list[bytes] = []
        for arrival in arrivals:
            for piece in arrival.pieces:
                text, logprobs = self._part(arrival.index, [piece])
                if logprobs is not None:
                    events.append(self._chunk(arrival.index, text, logprobs))
                elif text:
                    events.append(self._texts[arrival.index].fill(text))
            if arrival.final is not None:
                events.append(self._chunk(arrival.index, "", None, self._reason(arrival.final.reason)))
        return events

    def end(self) -> list[bytes]:
        usage = [server_sent(self._completion([], self._usage()))] if self._include_usage else []
        return [*usage, DONE]

    def failed(self, error: TandemError) -> list[bytes]:
        return [server_sent(error_body(error))]

    def whole(self, arrivals: Sequence[Arrival]) -> Completion:
        choices: list[CompletionChoice] = []
        for index in range(len(self._answers.submitted)):
            pieces, reason = _choice_of(index, arrivals)
            choices.append(CompletionChoice(index, *self._part(index, pieces), self._reason(reason)))
        return self._completion(choices, self._usage())

    def _part(self, index: int, pieces: Sequence[TextPiece]) -> tuple[str, CompletionLogprobs | None]:
        """Text and logprobs of the next pieces. With `echo`, those of the prompt go before the first ones."""
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

    def _reason(self, reason: FinishReason | None) -> FinishReason | None:
        return FinishReason.LENGTH if self._prompt_only else reason

    def _usage(self) -> CompletionUsage:
        usage = self._answers.usage()
        if self._prompt_only:
            usage = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return completion_usage(usage)

    def _chunk(
        self, index: int, text: str, logprobs: CompletionLogprobs | None = None, reason: FinishReason | None = None
    ) -> bytes:
        choice = CompletionChoice(index, text, logprobs, reason)
        return server_sent(self._completion([choice], None if self._include_usage else UNSET))

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | UnsetType | None) -> Completion:
        model = self._answers.model.name
        return Completion(id=self._id, created=self._created, model=model, choices=choices, usage=usage)
