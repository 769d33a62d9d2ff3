"""Reads the answers to one client request (choices, prompts) as one stream. Most requests have one answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import StringIO

import msgspec

from router.requests.output import Final, OutToken, ResponseStream, TextPiece, Usage
from router.requests.validation import ServingModel, ValidRequest
from tandem.errors import TandemError
from tandem.request import FinishReason


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    request: ValidRequest
    model: ServingModel
    stream: ResponseStream


def call_ids(answer: str) -> Callable[[int], str]:
    """Gives the id of each tool call of an answer: nine letters and digits, which all templates take."""

    def id_of(call: int) -> str:
        digest = blake2b(f"{answer}/{call}".encode(), digest_size=6).digest()
        return base64.b32encode(digest).decode()[:9].lower()

    return id_of


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
        self.reason: FinishReason | None = None

    def add(self, arrival: Arrival) -> None:
        for piece in arrival.pieces:
            self._text.write(piece.text)
            self.tokens += [token for token in piece.tokens if token.logprob is not None]
        if arrival.final is not None:
            self.reason = arrival.final.reason

    @property
    def text(self) -> str:
        return self._text.getvalue()


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

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once for all its choices."""
        return sum(each.request.prompt_tokens for each in self.submitted[:: self._choices])

    @property
    def ended(self) -> bool:
        """All output of all answers was taken."""
        return not self._waiting

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
            self.cancel()
            raise
        if has_final:
            self._waiting = [index for index in self._waiting if self._finals[index] is None]
        return arrivals

    async def next(self) -> list[Arrival]:
        """Waits for output: at least one arrival. Call it only before `ended`. Raises as `take`."""
        wake = asyncio.Event()
        self.wake_with(wake.set)
        while not (arrivals := self.take()):
            wake.clear()
            await wake.wait()
        return arrivals

    async def collect(self) -> list[WholeAnswer]:
        """Waits for the ends of all answers. Raises as `take`."""
        wholes = [WholeAnswer() for _ in self.submitted]
        while not self.ended:
            for arrival in await self.next():
                wholes[arrival.index].add(arrival)
        return wholes

    def call_ids(self, index: int) -> Callable[[int], str]:
        """Gives the id of each tool call of answer `index`."""
        return call_ids(f"{self.request_id}/{index}")

    def cancel(self) -> None:
        """Cancels all answers. Idempotent."""
        for each in self.submitted:
            each.stream.cancel()

    def usage(self) -> Usage:
        """Usage of all answers; a prompt counts once for all its choices."""
        prompts = [final.usage for final in self._finals[:: self._choices] if final is not None]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            completion_tokens=sum(final.usage.completion_tokens for final in self._finals if final is not None),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
        )
