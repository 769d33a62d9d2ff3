"""The router's waiting room: bounded, fair between classes and tenants, and closed to who would wait too long.

Each model has a line of two tiers: batch classes have their turn while nobody else waits. A request waits while its
pool has no room or is restarting, and is refused when that takes longer than its class or its deadline allows; at once,
when the pool's pace shows that it would. Pure; the dispatcher passes the time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from router.admission.fair_queue import FairQueue
from router.admission.waiting_line import Line, Waiting
from router.terms import RequestTerms
from tandem.config.spec import ClassSpec
from tandem.errors import DeadlineExceeded, NoWorker, OverloadedError, TandemError

Item = TypeVar("Item")

MIN_RETRY_AFTER_S = 1.0  # where nothing better is known
SHORTEST_RETRY_S = 0.1
REFUSED_HOLD_S = 0.05  # between two tries of a request that workers could not take
SLO_SHARE = 0.8  # a prediction is a mean: what is predicted within this share of the objective will mostly keep it
NO_WORKER_RETRY_S = 5.0
SPARE_DUES = 64


class Refusal(StrEnum):
    """Why a request was refused; a metric label."""

    SLO = "slo"  # its first token would come later than its class promises
    DEADLINE = "deadline"  # its deadline passed, or cannot be met any more
    QUEUE_FULL = "queue_full"
    PUSHED_OUT = "pushed_out"  # the queue was full, and somebody with less in it came
    TIMEOUT = "timeout"  # it waited as long as it may


@dataclass(frozen=True, slots=True)
class _Prefilling(Generic[Item]):
    line: Line[Item]
    tokens: int
    batch: bool


class Admission(Generic[Item]):
    """Items are hashable.

    Args:
        classes: as configured.
        max_queued_requests: of all models together.
        queue_timeout_s: of classes that have none of their own.
        budget_tokens: prompt tokens that one worker is given at a time.
    """

    def __init__(
        self, classes: Sequence[ClassSpec], *, max_queued_requests: int, queue_timeout_s: float, budget_tokens: int
    ) -> None:
        self.refusals: Counter[tuple[str, Refusal]] = Counter()  # by class
        self._classes = {each.name: each for each in classes}
        self._max_queued = max_queued_requests
        self._timeouts_s = {each.name: each.queue_timeout_s or queue_timeout_s for each in classes}
        self._budget_tokens = budget_tokens
        self._lines: dict[str, Line[Item]] = {}
        self._waiting: dict[Item, tuple[Line[Item], Waiting[Item]]] = {}
        self._prefilling: dict[Item, _Prefilling[Item]] = {}
        self._dues: list[tuple[float, int, Waiting[Item]]] = []  # a heap; some no longer wait
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: Item) -> bool:
        """It waits."""
        return item in self._waiting

    def items(self) -> list[Item]:
        return list(self._waiting)

    def queued_by_class(self) -> dict[str, int]:
        counts = Counter(entry.priority for _, entry in self._waiting.values())
        return {name: counts[name] for name in self._classes}

    def rates(self) -> dict[str, float]:
        """Prompt tokens per second of each model's pool, where that was seen."""
        known = {model: line.rate.tokens_per_s() for model, line in self._lines.items()}
        return {model: rate for model, rate in known.items() if rate is not None}

    # ---- in

    def offer(
        self, model: str, item: Item, terms: RequestTerms, tokens: int, now_s: float
    ) -> list[tuple[Item, TandemError]]:
        """Queues a request of `tokens` prompt tokens. Returns who lost the place to it, each with the reason.

        Raises OverloadedError when it would wait too long or finds no place, DeadlineExceeded when it is too late.
        """
        line = self._line(model)
        self._check_time(line, terms, tokens, now_s)
        pushed_out = self._make_place(line, terms, now_s)
        entry = Waiting(item, terms, tokens, now_s, now_s)
        line.tier(self._classes[terms.priority]).add(entry)
        self._note(line, entry)
        return pushed_out

    def put_back(
        self,
        model: str,
        item: Item,
        terms: RequestTerms,
        tokens: int,
        *,
        since_s: float,
        now_s: float,
        refusal: TandemError | None,
    ) -> None:
        """A request that had been dispatched waits again, first in its tier. It waits since `since_s`."""
        self.remove(item)
        line, hold_s = self._line(model), 0.0 if refusal is None else REFUSED_HOLD_S
        entry = Waiting(item, terms, tokens, since_s, now_s + hold_s, refusal)
        line.tier(self._classes[terms.priority]).put_first(entry)
        self._note(line, entry)

    # ---- out

    def dispatch(self, now_s: float, place: Callable[[Item], bool], prefillers: Callable[[str], int]) -> None:
        """Offers the next of each line to `place`, and the one after it as long as that says it took one.

        `prefillers` gives how many workers prefill for a model; 0: none of its workers can take a request.
        """
        for line in self._lines.values():
            workers = prefillers(line.model) if len(line) else 0
            if workers:
                line.worker_seen_s = now_s
                line.batch_budget_tokens = workers * self._budget_tokens // 2
            for tier in line.tiers:
                self._dispatch_tier(line, tier, now_s, place)
                if tier:
                    break
            # Without a worker nothing moves, and that is no pace.
            line.rate.set_waiting(now_s, bool(workers and line.first))

    def oversized_batch(self) -> list[Item]:
        """Batch prompts longer than a dispatch budget that are being prefilled while others wait."""
        if not any(line.batch_tokens and line.first for line in self._lines.values()):
            return []
        return [
            item
            for item, each in self._prefilling.items()
            if each.batch and each.tokens > self._budget_tokens and each.line.first
        ]

    def first_token(self, item: Item, now_s: float) -> None:
        """A dispatched request's prompt is computed."""
        if (done := self._stop(item)) is not None:
            done.line.rate.first_token(done.tokens, now_s)

    def remove(self, item: Item) -> None:
        """A request has ended, or its attempt has. Idempotent."""
        self._stop(item)
        if (found := self._waiting.pop(item, None)) is not None:
            line, entry = found
            line.tier(self._classes[entry.priority]).remove(entry)

    def expire(self, now_s: float) -> list[tuple[Item, TandemError]]:
        """Takes out those that have waited too long or can no longer be in time, each with the reason."""
        expired: list[tuple[Item, TandemError]] = []
        while (next_s := self._next_expiry_s()) is not None and next_s <= now_s:
            _, _, entry = heapq.heappop(self._dues)
            line, _ = self._waiting[entry.item]
            due_s = self._due_s(line, entry)
            if due_s > now_s:  # the pool has become faster since
                heapq.heappush(self._dues, (due_s, next(self._order), entry))
                continue
            expired.append((entry.item, self._too_late(line, entry, now_s)))
            self.remove(entry.item)
        return expired

    def next_due_s(self, now_s: float) -> float | None:
        """When time alone changes something: a wait ends or a hold is over. None while nothing waits."""
        heads = [tier.head() for line in self._lines.values() for tier in line.tiers]
        due = [head.hold_until_s for head in heads if head is not None and head.hold_until_s > now_s]
        if (next_s := self._next_expiry_s()) is not None:
            due.append(next_s)
        return min(due, default=None)

    # ---- inside

    def _dispatch_tier(
        self, line: Line[Item], tier: FairQueue[Waiting[Item]], now_s: float, place: Callable[[Item], bool]
    ) -> None:
        batch = tier is line.batch
        while (entry := tier.head()) is not None and entry.hold_until_s <= now_s:
            if not line.has_room(entry, batch=batch):
                return
            line.start(entry.tokens, batch=batch)
            self._prefilling[entry.item] = _Prefilling(line, entry.tokens, batch)
            if not place(entry.item):
                self._stop(entry.item)
                return
            if self._is_waiting(entry):  # else it ended while it was placed
                del self._waiting[entry.item]
                tier.take(entry)

    def _stop(self, item: Item) -> _Prefilling[Item] | None:
        found = self._prefilling.pop(item, None)
        if found is not None:
            found.line.stop(found.tokens, batch=found.batch)
        return found

    def _check_time(self, line: Line[Item], terms: RequestTerms, tokens: int, now_s: float) -> None:
        spec = self._classes[terms.priority]
        limits_s: list[tuple[float, Refusal, str]] = []
        if terms.deadline_s is not None:
            left_s = terms.deadline_s - now_s
            limits_s.append((left_s, Refusal.DEADLINE, f"{left_s:.3g} s, its deadline"))
            if left_s <= 0:
                self.refusals[spec.name, Refusal.DEADLINE] += 1
                raise DeadlineExceeded("the request's deadline passed before it could be queued")
        if spec.ttft_slo_s is not None:
            limits_s.append((SLO_SHARE * spec.ttft_slo_s, Refusal.SLO, f"{spec.ttft_slo_s:g} s (class {spec.name!r})"))
        predicted_s = line.predicted_ttft_s(spec, terms.tenant, tokens) if limits_s else None
        if predicted_s is None:
            return
        limit_s, refusal, wanted = min(limits_s)
        if predicted_s > limit_s:
            self.refusals[spec.name, refusal] += 1
            raise OverloadedError(
                f"expected a first token within {wanted}; with those before it, it would take {predicted_s:.3g} s; "
                "retry later",
                retry_after_s=max(SHORTEST_RETRY_S, predicted_s - limit_s),
            )

    def _make_place(self, line: Line[Item], terms: RequestTerms, now_s: float) -> list[tuple[Item, TandemError]]:
        """When the queue is full, who has most in it gives a place to who has less; batch classes before others."""
        if len(self) < self._max_queued:
            return []
        spec = self._classes[terms.priority]
        own = (line.tier(spec).waiting_of(spec.name, terms.tenant) + 1) / spec.weight
        full = f"expected at most {self._max_queued} queued requests, and so many are waiting; retry later"
        retry_s = self._retry_after_s(line, now_s)
        lines = ((each, one) for each in self._lines.values() for one in each.tiers)
        longest = max(
            ((one is each.batch, count / weight, entry) for each, one in lines for weight, count, entry in one.lines()),
            key=lambda found: found[:2],
            default=None,
        )
        if longest is None or longest[:2] <= (spec.batch, own):
            self.refusals[spec.name, Refusal.QUEUE_FULL] += 1
            raise OverloadedError(full, retry_after_s=retry_s)
        entry = longest[2]
        self.refusals[entry.priority, Refusal.PUSHED_OUT] += 1
        self.remove(entry.item)
        return [(entry.item, OverloadedError(full, retry_after_s=retry_s))]

    def _due_s(self, line: Line[Item], entry: Waiting[Item]) -> float:
        """When its wait ends: by its class, or because it could not have its first token before its deadline."""
        due_s = entry.since_s + self._timeouts_s[entry.priority]
        if entry.terms.deadline_s is None:
            return due_s
        return min(due_s, entry.terms.deadline_s - line.least_s(entry.tokens))

    def _too_late(self, line: Line[Item], entry: Waiting[Item], now_s: float) -> TandemError:
        waited = f"waited {now_s - entry.since_s:.3g} s in the queue"
        timeout_s = self._timeouts_s[entry.priority]
        if now_s - entry.since_s < timeout_s:
            self.refusals[entry.priority, Refusal.DEADLINE] += 1
            return DeadlineExceeded(f"{waited}; its deadline cannot be met any more")
        self.refusals[entry.priority, Refusal.TIMEOUT] += 1
        if line.worker_seen_s is None or line.worker_seen_s < entry.since_s:
            missing = f"there was no decode worker for model {line.model!r}"
            return NoWorker(f"{waited}, and {missing}", retry_after_s=NO_WORKER_RETRY_S)
        retry_s = self._retry_after_s(line, now_s)
        if entry.refusal is not None:
            return type(entry.refusal)(f"{waited}; the last refusal: {entry.refusal.message}", retry_after_s=retry_s)
        return OverloadedError(f"{waited}, and no worker had room", retry_after_s=retry_s)

    def _retry_after_s(self, line: Line[Item], now_s: float) -> float:
        """As long as the first in line has waited: what a newcomer may expect at the least."""
        return max(MIN_RETRY_AFTER_S, line.longest_wait_s(now_s))

    def _note(self, line: Line[Item], entry: Waiting[Item]) -> None:
        self._waiting[entry.item] = (line, entry)
        heapq.heappush(self._dues, (self._due_s(line, entry), next(self._order), entry))
        if len(self._dues) > 2 * len(self._waiting) + SPARE_DUES:  # most have had their turn
            self._dues = [due for due in self._dues if self._is_waiting(due[2])]
            heapq.heapify(self._dues)

    def _next_expiry_s(self) -> float | None:
        while self._dues and not self._is_waiting(self._dues[0][2]):
            heapq.heappop(self._dues)
        return self._dues[0][0] if self._dues else None

    def _is_waiting(self, entry: Waiting[Item]) -> bool:
        found = self._waiting.get(entry.item)
        return found is not None and found[1] is entry

    def _line(self, model: str) -> Line[Item]:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = Line(model, list(self._classes.values()))
        return line
