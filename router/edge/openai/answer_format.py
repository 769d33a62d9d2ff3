"""Formats of the chat completions and completions APIs: a whole answer or the events of a stream, in pieces of JSON.
Pure except for the time of creation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from router.edge.json_slices import ListMaker, at_once, json_pieces, on_demand, one_by_one
from router.edge.openai.answer_parts import assistant_message, chat_finish_reason, chunk_delta
from router.edge.openai.answer_schema import (
    AnswerStruct,
    CachedTokens,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprobs,
    ChunkChoice,
    ChunkDelta,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionUsage,
    ErrorBody,
    ErrorDetail,
    PredictionTokens,
    ProposedTokens,
)
from router.edge.openai.logprobs import CompletionLogprobsBuilder, PromptLogprobs, chat_logprobs
from router.edge.openai.request_schema import UsageEvents
from router.edge.strict_model import FieldError
from router.model_formats.events import Event, Text
from router.requests.answers import AnswerReader, Answers, Arrival, WholeAnswer
from router.requests.output import Final, OutToken, TextPiece, Usage
from tandem.errors import ErrorCode, TandemError
from tandem.request import FinishReason


class AnswerFormat(Protocol):
    """Gives JSON in pieces, which are made as they are taken. Each method is given every arrival once, in order."""

    def begin(self) -> Iterable[bytes]:
        """Events before the first token."""
        ...

    def events(self, arrivals: Sequence[Arrival]) -> Iterable[bytes]: ...

    def end(self) -> Iterable[bytes]:
        """Events after the end of the last answer."""
        ...

    def failed(self, error: TandemError) -> Iterable[bytes]:
        """Events instead of all further ones."""
        ...

    def whole(self, wholes: Sequence[WholeAnswer]) -> Iterable[bytes]:
        """All answers as one object."""
        ...


# Codes that clients know OpenAI's names of.
_OPENAI_CODES = {
    ErrorCode.INVALID_ARGUMENT: "invalid_value",
    ErrorCode.UNSUPPORTED_FIELD: "unsupported_parameter",
    ErrorCode.CONTEXT_EXCEEDED: "context_length_exceeded",
    ErrorCode.UNAUTHENTICATED: "invalid_api_key",
    ErrorCode.RATE_LIMITED: "rate_limit_exceeded",
}


def error_body(error: TandemError) -> ErrorBody:
    named = error.openai_code if isinstance(error, FieldError) else _OPENAI_CODES.get(error.code)
    return ErrorBody(ErrorDetail(error.message, error.wire.openai_type, error.field, named or error.code.value))


def completion_usage(usage: Usage, *, has_prediction: bool = False) -> CompletionUsage:
    total_tokens = usage.prompt_tokens + usage.completion_tokens
    details = CachedTokens(usage.cached_tokens)
    made = CompletionUsage(usage.prompt_tokens, usage.completion_tokens, total_tokens, details)
    if has_prediction:
        made.completion_tokens_details = PredictionTokens(
            usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
        )
    if usage.accepted_tokens or usage.unused_tokens:
        made.speculation = ProposedTokens(usage.accepted_tokens, usage.unused_tokens)
    return made


def usage_of(answers: Answers) -> CompletionUsage:
    """Of all answers to a call, at their end."""
    return completion_usage(answers.usage(), has_prediction=answers.has_prediction)


def server_sent(event: AnswerStruct) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def event_pieces(event: AnswerStruct) -> Iterator[bytes]:
    """As `server_sent`, for an event that may be large."""
    yield b"data: "
    yield from json_pieces(event)
    yield b"\n\n"


DONE = b"data: [DONE]\n\n"
FEW_PIECES = 32  # of one arrival, as nearly always: their events are made at once, which costs less
_TEXT = "\x00"
_TEXT_JSON = msgspec.json.encode(_TEXT)


class TextEventTemplate:
    """Makes events that differ in one text only, which are most of a stream. The JSON around the text is encoded
    once."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make` gives the event of a text. The text is the last value in the event that a client can choose."""
        self._before, _, self._after = make(_TEXT).rpartition(_TEXT_JSON)

    def fill(self, text: str) -> bytes:
        return b"".join((self._before, msgspec.json.encode(text), self._after))


class UsageField:
    """The field `usage` of a stream's events."""

    def __init__(self, answers: Answers, events: UsageEvents) -> None:
        self.is_last_event = events is not UsageEvents.NONE
        self.is_each = events is UsageEvents.EACH
        self._answers = answers
        self._tokens = 0

    def add(self, arrival: Arrival) -> None:
        if self.is_each:
            self._tokens += sum(len(piece.tokens) for piece in arrival.pieces)

    def text_event(self, make: Callable[[str], bytes]) -> Callable[[str], bytes]:
        """As `make`, which gives the event of a text; faster unless the usage differs in each."""
        return make if self.is_each else TextEventTemplate(make).fill

    def now(self) -> CompletionUsage | UnsetType | None:
        if self.is_each:
            return completion_usage(Usage(self._answers.prompt_tokens, self._tokens, 0))
        return None if self.is_last_event else UNSET


def tokens_of(pieces: Sequence[TextPiece]) -> list[OutToken]:
    return [token for piece in pieces for token in piece.tokens]


def text_of(pieces: Sequence[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


class ChatFormat:
    def __init__(self, answers: Answers, *, usage: UsageEvents, logprobs: bool) -> None:
        self._answers = answers
        self._decoder = answers.model.tokenizer
        self._usage = UsageField(answers, usage)
        self._logprobs = logprobs
        self._id = f"chatcmpl-{answers.request_id}"
        self._created = int(time.time())
        self._text_events = [self._text_event(index) for index in range(len(answers.submitted))]
        self._readers = [answers.reader(index) for index in range(len(answers.submitted))]
        are_plain = all(reader.is_plain for reader in self._readers)
        self._takes_lists = are_plain and not logprobs and not self._usage.is_each

    def _text_event(self, index: int) -> Callable[[str], bytes]:
        return self._usage.text_event(lambda text: self._chunk(index, ChunkDelta(content=text)))

    def begin(self) -> list[bytes]:
        first = ChunkDelta(role="assistant", content="")
        return [self._chunk(index, first) for index in range(len(self._answers.submitted))]

    def events(self, arrivals: Sequence[Arrival]) -> Iterable[bytes]:
        return self._events(arrivals[0]) if len(arrivals) == 1 else chain.from_iterable(map(self._events, arrivals))

    def _events(self, arrival: Arrival) -> Iterable[bytes]:
        index, pieces, final = arrival.index, arrival.pieces, arrival.final
        if self._takes_lists and len(pieces) <= FEW_PIECES:
            event_of = self._text_events[index]
            made = []
            for piece in pieces:
                if piece.text:
                    made.append(event_of(piece.text))
            if final is not None:
                made.append(self._end_of(index, final))
            return made
        self._usage.add(arrival)
        if not (reader := self._readers[index]).is_plain:
            return self._read(arrival, reader)
        events = self._scored(arrival) if self._logprobs else self._texts(arrival)
        return events if final is None else chain(events, [self._end_of(index, final)])

    def _end_of(self, index: int, final: Final) -> bytes:
        return self._chunk(index, ChunkDelta(), None, ChatFinishReason(final.reason))

    def _texts(self, arrival: Arrival) -> Iterator[bytes]:
        for piece in arrival.pieces:
            if piece.text:
                yield self._text_events[arrival.index](piece.text)

    def _scored(self, arrival: Arrival) -> Iterator[bytes]:
        for piece in arrival.pieces:
            logprobs = chat_logprobs(self._decoder, piece.tokens)
            if piece.text or (logprobs is not None and logprobs.content):
                yield self._chunk(arrival.index, ChunkDelta(content=piece.text), logprobs)

    def _read(self, arrival: Arrival, reader: AnswerReader) -> Iterator[bytes]:
        """The chunks of an answer that may have reasoning or calls."""
        pieces = arrival.pieces
        if not self._logprobs:
            yield from self._deltas(arrival.index, reader.feed(text_of(pieces)), None)
        else:
            for piece in pieces:
                logprobs = chat_logprobs(self._decoder, piece.tokens)
                yield from self._deltas(arrival.index, reader.feed(piece.text), logprobs)
        if arrival.final is not None:
            yield from self._deltas(arrival.index, reader.finish(), None)
            reason = chat_finish_reason(reader, arrival.final.reason)
            yield self._chunk(arrival.index, ChunkDelta(), None, reason)

    def _deltas(self, index: int, events: Sequence[Event], logprobs: ChatLogprobs | None) -> Iterator[bytes]:
        """`logprobs`: of the tokens that were fed, with the first chunk."""
        if logprobs is not None and not logprobs.content:
            logprobs = None
        for event in events:
            if logprobs is None and isinstance(event, Text):
                yield self._text_events[index](event.text)
            elif (delta := chunk_delta(self._readers[index], event)) is not None:
                yield self._chunk(index, delta, logprobs)
                logprobs = None
        if logprobs is not None:
            yield self._chunk(index, ChunkDelta(content=""), logprobs)

    def end(self) -> list[bytes]:
        usage = [self._event([], usage_of(self._answers))] if self._usage.is_last_event else []
        return [*usage, DONE]

    def failed(self, error: TandemError) -> list[bytes]:
        return [server_sent(error_body(error))]

    def whole(self, wholes: Sequence[WholeAnswer]) -> Iterator[bytes]:
        return json_pieces(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._answers.model.name,
                choices=one_by_one(lambda index: self._choice(index, wholes[index]), range(len(wholes))),
                usage=usage_of(self._answers),
            )
        )

    def _choice(self, index: int, whole: WholeAnswer) -> ChatChoice:
        logprobs = chat_logprobs(self._decoder, whole.tokens, on_demand) if self._logprobs else None
        reason = whole.reason or FinishReason.STOP
        reader = self._readers[index]
        message = assistant_message(reader, [*reader.feed(whole.text), *reader.finish()])
        return ChatChoice(index, message, logprobs, chat_finish_reason(reader, reason))

    def _chunk(
        self,
        index: int,
        delta: ChunkDelta,
        logprobs: ChatLogprobs | None = None,
        reason: ChatFinishReason | None = None,
    ) -> bytes:
        return self._event([ChunkChoice(index, delta, logprobs, reason)], self._usage.now())

    def _event(self, choices: list[ChunkChoice], usage: CompletionUsage | UnsetType | None) -> bytes:
        model = self._answers.model.name
        return server_sent(
            ChatCompletionChunk(id=self._id, created=self._created, model=model, choices=choices, usage=usage)
        )


class CompletionFormat:
    """`prompt_only`: leaves out the one token that every request generates."""

    def __init__(self, answers: Answers, *, usage: UsageEvents, prompt_only: bool = False) -> None:
        self._answers = answers
        self._usage = UsageField(answers, usage)
        self._prompt_only = prompt_only
        self._logprobs = [CompletionLogprobsBuilder(answers.model.tokenizer) for _ in answers.submitted]
        self._prompts: dict[int, PromptLogprobs] = {}  # by their first choice
        self._held: dict[int, list[Arrival]] = {}  # of other choices, until the first one has begun
        self._started: set[int] = set()
        self._id = f"cmpl-{answers.request_id}"
        self._created = int(time.time())
        self._text_events = [
            self._usage.text_event(partial(self._chunk, index)) for index in range(len(answers.submitted))
        ]

    def begin(self) -> list[bytes]:
        return []

    def events(self, arrivals: Sequence[Arrival]) -> Iterator[bytes]:
        for arrival in arrivals:
            first = self._answers.first_choice(arrival.index)
            if first != arrival.index and first not in self._started and self._has_scores(first):
                self._held.setdefault(first, []).append(arrival)
                continue
            yield from self._events(arrival)
            for held in self._held.pop(arrival.index, ()):
                yield from self._events(held)

    def _events(self, arrival: Arrival) -> Iterator[bytes]:
        self._usage.add(arrival)
        for piece in arrival.pieces:
            if arrival.index not in self._started and self._echo_of(arrival.index) is not None:
                part = self._part(arrival.index, piece.text, piece.tokens, on_demand)
                yield from event_pieces(self._event(CompletionChoice(arrival.index, *part, None)))
                continue
            text, logprobs = self._part(arrival.index, piece.text, piece.tokens)
            if logprobs is not None:
                yield self._chunk(arrival.index, text, logprobs)
            elif text:
                yield self._text_events[arrival.index](text)
        if arrival.final is not None:
            yield self._chunk(arrival.index, "", None, self._reason(arrival.final.reason))

    def end(self) -> list[bytes]:
        usage = [server_sent(self._completion([], self._usage_of_all()))] if self._usage.is_last_event else []
        return [*usage, DONE]

    def failed(self, error: TandemError) -> list[bytes]:
        return [server_sent(error_body(error))]

    def whole(self, wholes: Sequence[WholeAnswer]) -> Iterator[bytes]:
        choices = one_by_one(lambda index: self._choice(index, wholes[index]), range(len(wholes)))
        return json_pieces(self._completion(choices, self._usage_of_all()))

    def _choice(self, index: int, whole: WholeAnswer) -> CompletionChoice:
        text, logprobs = self._part(index, whole.text, whole.tokens, on_demand)
        return CompletionChoice(index, text, logprobs, self._reason(whole.reason))

    def _part(
        self, index: int, text: str, tokens: Sequence[OutToken], listed: ListMaker = at_once
    ) -> tuple[str, CompletionLogprobs | None]:
        """The next text of an answer, and its logprobs. With `echo`, those of the prompt go before the first ones."""
        if self._prompt_only:
            text, tokens = "", ()
        scored = [token for token in tokens if token.logprob is not None]
        is_begun = index in self._started
        self._started.add(index)
        if is_begun or (echo := self._echo_of(index)) is None:
            return text, self._logprobs[index].build(scored, listed)
        if not self._has_scores(first := self._answers.first_choice(index)):
            return echo + text, self._logprobs[index].build(scored, listed)
        return echo + text, self._logprobs[index].build_after(self._prompt(first), scored)

    def _has_scores(self, first: int) -> bool:
        """Whether the prompt of this choice, the first of its prompt, has logprobs."""
        return self._answers.submitted[first].request.sampling.prompt_logprobs is not None

    def _prompt(self, first: int) -> PromptLogprobs:
        if (known := self._prompts.get(first)) is None:
            each = self._answers.submitted[first]
            known = PromptLogprobs(each.model.tokenizer, each.request.prompt, each.stream.prompt_scores)
            self._prompts[first] = known
        return known

    def _echo_of(self, index: int) -> str | None:
        return self._answers.submitted[index].request.echo

    def _reason(self, reason: FinishReason | None) -> FinishReason | None:
        return FinishReason.LENGTH if self._prompt_only else reason

    def _usage_of_all(self) -> CompletionUsage:
        if not self._prompt_only:
            return usage_of(self._answers)
        usage = self._answers.usage()
        return completion_usage(Usage(usage.prompt_tokens, 0, usage.cached_tokens))

    def _chunk(
        self, index: int, text: str, logprobs: CompletionLogprobs | None = None, reason: FinishReason | None = None
    ) -> bytes:
        return server_sent(self._event(CompletionChoice(index, text, logprobs, reason)))

    def _event(self, choice: CompletionChoice) -> Completion:
        return self._completion([choice], self._usage.now())

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | UnsetType | None) -> Completion:
        model = self._answers.model.name
        return Completion(id=self._id, created=self._created, model=model, choices=choices, usage=usage)
