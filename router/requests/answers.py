"""Reads the answers to one client request (choices, prompts) as one stream. Most requests have one answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import StringIO

import msgspec

from router.model_formats.custom_input import InputDecoder
from router.model_formats.events import CallArguments, CallEnded, CallInput, CallStarted, Event, Text
from router.requests.output import Final, OutToken, ResponseStream, TextPiece, Usage
from router.requests.raw_request import ValidRequest
from router.requests.serving_model import ServingModel
from router.texts.chat_model import AnswerReading
from tandem.errors import TandemError
from tandem.request import FinishReason


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    request: ValidRequest
    model: ServingModel
    stream: ResponseStream


class AnswerReader:
    """Finds the parts of one answer in its text. `is_plain`: there are none but text.

    Args: `answer_id`: of all answers; ids of calls come from it, if the model writes none.
    """

    def __init__(self, reading: AnswerReading | None, answer_id: str) -> None:
        self.is_plain = reading is None
        self.has_calls = False  # a whole one was found
        self._parser = None if reading is None else reading.parser()
        self._custom: frozenset[str] = frozenset() if reading is None else reading.custom
        self._decoder: InputDecoder | None = None  # of the call that is open, if its tool is a custom one
        self._answer_id = answer_id

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Text(text)] if self._parser is None else self._noted(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """What was held back. The answer is at its end."""
        return [] if self._parser is None else self._noted(self._parser.finish())

    def call_id(self, call: CallStarted) -> str:
        """Nine letters and digits, which all templates take, or what the model wrote."""
        if call.id is not None:
            return call.id
        digest = blake2b(f"{self._answer_id}/{call.index}".encode(), digest_size=6).digest()
        return base64.b32encode(digest).decode()[:9].lower()

    def _noted(self, events: list[Event]) -> list[Event]:
        self.has_calls = self.has_calls or any(isinstance(each, CallEnded) for each in events)
        if not self._custom:
            return events
        found = map(self._with_input, events)
        return [each for each in found if not isinstance(each, CallInput) or each.text]

    def _with_input(self, event: Event) -> Event:
        match event:
            case CallStarted():
                self._decoder = InputDecoder() if event.name in self._custom else None
                return replace(event, is_custom=self._decoder is not None)
            case CallArguments() if self._decoder is not None:
                return CallInput(event.index, self._decoder.feed(event.text))
            case _:
                return event


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """New pieces of answer `index`; `final` is set with the last."""

    index: int
    pieces: Sequence[TextPiece]
    final: Final | None


class WholeAnswer:
    """One answer, collected. Tokens without logprobs are kept as text only, which is much smaller."""

    def __init__(self) -> None:
        self._text = StringIO(newline="")  # changes no line end
        self.tokens: list[OutToken] = []  # with logprobs
        self.pieces: list[TextPiece] = []  # if their tokens have logprobs
        self.reason: FinishReason | None = None

    def add(self, arrival: Arrival) -> None:
        for piece in arrival.pieces:
            self._text.write(piece.text)
            self.tokens += [token for token in piece.tokens if token.logprob is not None]
            if self.tokens:
                self.pieces.append(piece)
        if arrival.final is not None:
            self.reason = arrival.final.reason

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def chars(self) -> int:
        return self._text.tell()


class Answers:
    """`submitted`: `choices` answers for each prompt, prompt by prompt."""

    def __init__(self, request_id: str, submitted: Sequence[SubmittedRequest], choices: int) -> None:
        self.request_id = request_id
        self.submitted = submitted
        self.model = submitted[0].model
        self._choices = choices
        self._finals: list[Final | None] = [None] * len(submitted)
        self._waiting = list(range(len(submitted)))  # answers that have not ended
        self.has_failed = False  # an error follows the pieces taken
        self.failed: int | None = None  # the answer whose error was raised

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once for all its choices."""
        return sum(each.request.prompt_tokens for each in self.submitted[:: self._choices])

    def first_choice(self, index: int) -> int:
        """The first answer to the prompt of this one. Only its stream has the prompt's logprobs."""
        return index - index % self._choices

    @property
    def has_prediction(self) -> bool:
        """The client sent one."""
        return self.submitted[0].request.prediction is not None

    @property
    def ended(self) -> bool:
        """All output of all answers was taken."""
        return not self._waiting

    @property
    def is_ending(self) -> bool:
        """The end of the only answer that has not ended has come, or its error."""
        if len(self._waiting) != 1:
            return False
        stream = self.submitted[self._waiting[0]].stream
        return stream.final is not None or stream.has_failed

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Calls `wake` on every change of any answer from now on."""
        for each in self.submitted:
            each.stream.wake_with(wake)

    def take(self) -> list[Arrival]:
        """Returns the output since the last call. If an answer failed, cancels the others and raises its
        TandemError."""
        arrivals: list[Arrival] = []
        has_final = False
        try:
            for index in self._waiting:
                stream = self.submitted[index].stream
                if arrivals and stream.fails_next and not self.has_failed:
                    self.has_failed = True
                    break
                pieces, final = stream.take(), stream.final
                if final is not None:
                    self._finals[index] = final
                    has_final = True
                elif not pieces:
                    continue
                elif stream.has_failed:
                    self.has_failed = True
                arrivals.append(Arrival(index, pieces, final))
        except TandemError:
            self.failed = index
            self.cancel()
            raise
        if has_final:
            self._waiting = [index for index in self._waiting if self._finals[index] is None]
        return arrivals

    async def next(self) -> list[Arrival]:
        """Waits for output: at least one arrival. Call it only before `ended`. Raises as `take`."""
        changed: asyncio.Future[None] | None = None

        def wake() -> None:
            if changed is not None and not changed.done():
                changed.set_result(None)

        self.wake_with(wake)
        while not (arrivals := self.take()):
            changed = asyncio.get_running_loop().create_future()
            await changed
        return arrivals

    async def collect(self) -> list[WholeAnswer]:
        """Waits for the ends of all answers. Raises as `take`."""
        wholes = [WholeAnswer() for _ in self.submitted]
        while not self.ended:
            for arrival in await self.next():
                wholes[arrival.index].add(arrival)
        return wholes

    @property
    def are_plain(self) -> bool:
        """Text alone, without reasoning or calls."""
        return all(each.request.reading is None for each in self.submitted)

    def reader(self, index: int = 0) -> AnswerReader:
        """For one reading of answer `index`."""
        return AnswerReader(self.submitted[index].request.reading, f"{self.request_id}/{index}")

    def cancel(self) -> None:
        """Cancels all answers. Idempotent."""
        for each in self.submitted:
            each.stream.cancel()

    def usage(self) -> Usage:
        """Usage of all answers; a prompt counts once for all its choices."""
        prompts = [final.usage for final in self._finals[:: self._choices] if final is not None]
        answers = [final.usage for final in self._finals if final is not None]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            completion_tokens=sum(usage.completion_tokens for usage in answers),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            accepted_tokens=sum(usage.accepted_tokens for usage in answers),
            unused_tokens=sum(usage.unused_tokens for usage in answers),
            accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in answers),
            rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in answers),
        )
