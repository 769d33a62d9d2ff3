"""What waits for one model's pool, in two tiers, and what of it is being prefilled. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.admission.drain_rate import DrainRate
from router.admission.fair_queue import FairQueue
from router.terms import RequestTerms
from tandem.config.spec import ClassSpec
from tandem.errors import TandemError

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Waiting(Generic[Item]):
    item: Item
    terms: RequestTerms
    tokens: int  # that have to be prefilled
    since_s: float
    hold_until_s: float
    refusal: TandemError | None = None  # the last answer of a worker that could not take it

    @property
    def priority(self) -> str:
        return self.terms.priority

    @property
    def tenant(self) -> str:
        return self.terms.tenant


class Line(Generic[Item]):
    def __init__(self, model: str, classes: Sequence[ClassSpec]) -> None:
        self.model = model
        self.first: FairQueue[Waiting[Item]] = FairQueue({c.name: c.weight for c in classes if not c.batch})
        self.batch: FairQueue[Waiting[Item]] = FairQueue({c.name: c.weight for c in classes if c.batch})
        self.rate = DrainRate()
        self.worker_seen_s: float | None = None  # when a decode worker was last there
        self.prefilling_tokens = 0  # dispatched, without their first token yet; batch classes' among them
        self.batch_tokens = 0
        self.batch_budget_tokens = 0

    def __len__(self) -> int:
        return len(self.first) + len(self.batch)

    @property
    def tiers(self) -> tuple[FairQueue[Waiting[Item]], FairQueue[Waiting[Item]]]:
        """In the order of their turns."""
        return self.first, self.batch

    def __iter__(self) -> Iterator[Waiting[Item]]:
        for tier in self.tiers:
            yield from tier

    def tier(self, spec: ClassSpec) -> FairQueue[Waiting[Item]]:
        return self.batch if spec.batch else self.first

    def has_room(self, entry: Waiting[Item], *, batch: bool) -> bool:
        """Batch prompts take half of the dispatch budget at most, so that the others find room at once; one that is
        longer goes alone."""
        return not batch or not self.batch_tokens or self.batch_tokens + entry.tokens <= self.batch_budget_tokens

    def start(self, tokens: int, *, batch: bool) -> None:
        """A prompt goes to a worker."""
        self.prefilling_tokens += tokens
        self.batch_tokens += tokens * batch

    def stop(self, tokens: int, *, batch: bool) -> None:
        """It is computed, or taken back."""
        self.prefilling_tokens -= tokens
        self.batch_tokens -= tokens * batch

    def predicted_ttft_s(self, spec: ClassSpec, tenant: str, tokens: int) -> float | None:
        """Of a newcomer: all before it, and itself, at the pool's pace. None while that is not known, or when nobody
        stands before it: then it is dispatched as soon as it can be, and shows what the pace is."""
        ahead = self.tier(spec).tokens_ahead(spec.name, tenant)
        if spec.batch:
            ahead += sum(entry.tokens for entry in self.first)
        rate = self.rate.tokens_per_s()
        if rate is None or not ahead:
            return None
        return (self.prefilling_tokens + ahead + tokens) / rate

    def least_s(self, tokens: int) -> float:
        """The whole pool's time for one prompt: what it takes at the least, as far as that is known."""
        rate = self.rate.tokens_per_s()
        return 0.0 if rate is None else tokens / rate

    def longest_wait_s(self, now_s: float) -> float:
        """Of those whose turn is next."""
        heads = [head for tier in self.tiers if (head := tier.head()) is not None]
        return max((now_s - head.since_s for head in heads), default=0.0)
