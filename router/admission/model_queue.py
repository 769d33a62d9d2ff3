"""The requests that wait for one model's pool, in two tiers, and the prompts of that pool that are being prefilled.

Pure; the caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.admission.fair_turns import FairTurns
from router.request_terms import RequestTerms
from tandem.config.router import ClassSpec
from tandem.errors import TandemError

Item = TypeVar("Item")

WINDOW_S = 10.0
MIN_OBSERVED_S = 0.1
MIN_OBSERVATIONS = 3


class DrainRate:
    """Prompt tokens per second that reach their first token.

    Measured only while more requests wait: an idle pool's rate does not show its capacity. Older observations decay
    exponentially over `window_s` of that time.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._observations = 0
        self._since_last_s = 0.0  # measured time since the last first token
        self._measured_until_s: float | None = None  # None: no request waits, so nothing is measured

    def set_waiting(self, now_s: float, waiting: bool) -> None:
        """Whether requests wait for the pool from now on."""
        self._advance(now_s)
        self._measured_until_s = now_s if waiting else None

    def first_token(self, tokens: int, now_s: float) -> None:
        """A prompt of `tokens` tokens has its first token."""
        if self._measured_until_s is None:
            return
        self._advance(now_s)
        # The prompt was computed over the whole interval, so its mean age is half of it.
        self._tokens += tokens * math.exp(-self._since_last_s / (2 * self._window_s))
        self._since_last_s = 0.0
        self._observations += 1

    def tokens_per_s(self) -> float | None:
        """None until there are MIN_OBSERVATIONS over MIN_OBSERVED_S."""
        if self._observations < MIN_OBSERVATIONS or self._seconds < MIN_OBSERVED_S:
            return None
        return self._tokens / self._seconds

    def _advance(self, now_s: float) -> None:
        if self._measured_until_s is None or now_s <= self._measured_until_s:
            return
        passed_s = now_s - self._measured_until_s
        kept = math.exp(-passed_s / self._window_s)
        self._tokens *= kept
        self._seconds = self._seconds * kept + self._window_s * (1.0 - kept)
        self._since_last_s += passed_s
        self._measured_until_s = now_s


@dataclass(slots=True, eq=False)
class WaitingRequest(Generic[Item]):
    item: Item
    terms: RequestTerms
    tokens: int  # to prefill
    since_s: float
    hold_until_s: float
    refusal: TandemError | None = None  # the last refusal by a worker
    has_begun: bool = False  # a worker took it, and was lost or failed: its TTFT is past

    @property
    def priority(self) -> str:
        return self.terms.priority

    @property
    def tenant(self) -> str:
        return self.terms.tenant


class ModelQueue(Generic[Item]):
    def __init__(self, model: str, classes: Sequence[ClassSpec]) -> None:
        self.model = model
        self.regular: FairTurns[WaitingRequest[Item]] = FairTurns(
            {each.name: each.weight for each in classes if not each.batch}
        )
        self.batch: FairTurns[WaitingRequest[Item]] = FairTurns(
            {each.name: each.weight for each in classes if each.batch}
        )
        self.rate = DrainRate()
        self.worker_seen_s: float | None = None  # when the model last had a decode worker
        self.prefilling_tokens = 0  # dispatched and without a first token; includes batch classes
        self.batch_tokens = 0
        self.batch_budget_tokens = 0

    def __len__(self) -> int:
        return len(self.regular) + len(self.batch)

    @property
    def tiers(self) -> tuple[FairTurns[WaitingRequest[Item]], FairTurns[WaitingRequest[Item]]]:
        """In dispatch order."""
        return self.regular, self.batch

    def __iter__(self) -> Iterator[WaitingRequest[Item]]:
        for tier in self.tiers:
            yield from tier

    def tier(self, spec: ClassSpec) -> FairTurns[WaitingRequest[Item]]:
        return self.batch if spec.batch else self.regular

    def has_room(self, entry: WaitingRequest[Item], *, batch: bool) -> bool:
        """Batch prompts get at most half of the dispatch budget, so other classes always find room.

        A batch prompt longer than that is dispatched while no other batch prompt is prefilled.
        """
        return not batch or not self.batch_tokens or self.batch_tokens + entry.tokens <= self.batch_budget_tokens

    def start(self, tokens: int, *, batch: bool) -> None:
        """A prompt is dispatched to a worker."""
        self.prefilling_tokens += tokens
        self.batch_tokens += tokens * batch

    def stop(self, tokens: int, *, batch: bool) -> None:
        """A dispatched prompt is computed or withdrawn."""
        self.prefilling_tokens -= tokens
        self.batch_tokens -= tokens * batch

    def predicted_ttft_s(self, spec: ClassSpec, tenant: str, tokens: int) -> float | None:
        """TTFT of a new request: the prompts ahead and its own, at the measured rate.

        None while the rate is unknown, and for a request with none ahead of it: its dispatch measures the rate.
        """
        ahead = self.tier(spec).tokens_ahead(spec.name, tenant)
        if spec.batch:
            ahead += sum(entry.tokens for entry in self.regular)
        rate = self.rate.tokens_per_s()
        if rate is None or not ahead:
            return None
        return (self.prefilling_tokens + ahead + tokens) / rate

    def least_s(self, tokens: int) -> float:
        """The shortest time for a prompt: the whole pool computes it. 0 while the rate is unknown."""
        rate = self.rate.tokens_per_s()
        return 0.0 if rate is None else tokens / rate

    def longest_wait_s(self, now_s: float) -> float:
        """The longer wait of the two tiers' heads."""
        heads = [head for tier in self.tiers if (head := tier.head()) is not None]
        return max((now_s - head.since_s for head in heads), default=0.0)
