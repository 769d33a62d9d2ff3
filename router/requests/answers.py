"""Several answers to one client request (choices, prompts), read as one stream. One is the common case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from router.requests.output import Final, Piece, ResponseStream, Usage
from router.requests.request import ServingModel, ValidRequest
from tandem.errors import TandemError


@dataclass(frozen=True, slots=True)
class Submitted:
    request: ValidRequest
    model: ServingModel
    stream: ResponseStream


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """What came of the answer `index`; `final` set: it was the last."""

    index: int
    pieces: Sequence[Piece]
    final: Final | None


class Answers:
    """Args: `submitted` holds `choices` answers for each prompt, prompt by prompt."""

    def __init__(self, request_id: str, submitted: Sequence[Submitted], choices: int) -> None:
        self.request_id = request_id
        self.submitted = submitted
        self.model = submitted[0].model
        self._choices = choices
        self._finals: list[Final | None] = [None] * len(submitted)
        self._waiting = list(range(len(submitted)))  # answers that have not ended
        self.has_failed = False  # behind what was taken waits an error

    @property
    def ended(self) -> bool:
        """Everything was taken, of every answer."""
        return not self._waiting

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Calls `wake` from now on when something has come of any answer."""
        for each in self.submitted:
            each.stream.wake_with(wake)

    def take(self) -> list[Arrival]:
        """What has come since the last call. Raises the TandemError of the first answer that fails, and cancels the
        rest."""
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
        """Waits for what comes next, which is at least one arrival while they have not `ended`. Raises as `take`."""
        wake = asyncio.Event()
        self.wake_with(wake.set)
        while not (arrivals := self.take()):
            wake.clear()
            await wake.wait()
        return arrivals

    def cancel(self) -> None:
        """The reader wants no more. Idempotent."""
        for each in self.submitted:
            each.stream.cancel()

    def usage(self) -> Usage:
        """Of all answers; a prompt counts once, however many choices it has."""
        prompts = [final.usage for final in self._finals[:: self._choices] if final is not None]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            completion_tokens=sum(final.usage.completion_tokens for final in self._finals if final is not None),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
        )
