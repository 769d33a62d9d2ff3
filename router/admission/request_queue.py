"""The router's request queue: bounded, fair between classes and tenants, refusing requests that would wait too long.

Each model has a line of two tiers: batch classes are dispatched only while no other request waits. A request waits
while its pool has no room or is restarting. It is refused when it waits longer than its class, that class's TTFT
objective or its deadline allows, or at once when the pool's measured rate predicts that. Pure; the dispatcher passes
the time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from router.admission.fair_turns import FairTurns
from router.admission.model_queue import ModelQueue, WaitingRequest
from router.request_terms import RequestTerms
from tandem.config.router import ClassSpec
from tandem.errors import DeadlineExceeded, NoWorker, OverloadedError, TandemError

Item = TypeVar("Item")

REFUSED_HOLD_S = 0.05  # between two attempts of a request that a worker refused
MIN_RETRY_AFTER_S = 1.0  # without a better estimate
SHORTEST_RETRY_S = 0.1
LONGEST_RETRY_S = 60.0  # later the pool may be another: a pace measured while it stalls predicts hours
SLO_SHARE = 0.8  # a prediction is a mean: within this share of the objective, most requests meet it
NO_WORKER_RETRY_S = 5.0
SPARE_EXPIRIES = 64


class Refusal(StrEnum):
    """Why a request was refused; a metric label."""

    SLO = "slo"  # misses the TTFT objective of its class, by prediction or after waiting
    DEADLINE = "deadline"  # passed, or can no longer be met
    QUEUE_FULL = "queue_full"
    PUSHED_OUT = "pushed_out"  # the queue was full, and a tenant with fewer queued requests took the place
    TIMEOUT = "timeout"  # waited for the queue timeout


@dataclass(frozen=True, slots=True)
class _Prefilling(Generic[Item]):
    line: ModelQueue[Item]
    tokens: int
    batch: bool


class RequestQueue(Generic[Item]):
    """The queue of all models. Items must be hashable.

    Args:
        classes: as configured.
        max_queued_requests: for all models together.
        queue_timeout_s: for classes without one of their own.
        budget_tokens: prompt tokens dispatched to one worker at a time.
    """

    def __init__(
        self, classes: Sequence[ClassSpec], *, max_queued_requests: int, queue_timeout_s: float, budget_tokens: int
    ) -> None:
        self.refusals: Counter[tuple[str, Refusal]] = Counter()  # by class
        self._classes = {each.name: each for each in classes}
        self._max_queued = max_queued_requests
        self._timeouts_s = {each.name: each.queue_timeout_s or queue_timeout_s for each in classes}
        self._budget_tokens = budget_tokens
        self._lines: dict[str, ModelQueue[Item]] = {}
        self._waiting: dict[Item, tuple[ModelQueue[Item], WaitingRequest[Item]]] = {}
        self._prefilling: dict[Item, _Prefilling[Item]] = {}
        self._expiries: list[tuple[float, int, WaitingRequest[Item]]] = []  # a heap; may hold entries that left
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: Item) -> bool:
        """Whether the item waits."""
        return item in self._waiting

    def items(self) -> list[Item]:
        return list(self._waiting)

    def queued_by_class(self) -> dict[str, int]:
        counts = Counter(entry.priority for _, entry in self._waiting.values())
        return {name: counts[name] for name in self._classes}

    def rates(self) -> dict[str, float]:
        """Prompt tokens per second of each model's pool, where measured."""
        known = {model: line.rate.tokens_per_s() for model, line in self._lines.items()}
        return {model: rate for model, rate in known.items() if rate is not None}

    # ---- in

    def offer(
        self, model: str, item: Item, terms: RequestTerms, tokens: int, now_s: float
    ) -> list[tuple[Item, TandemError]]:
        """Queues a request of `tokens` prompt tokens. Returns the items evicted for it, each with its error.

        Raises OverloadedError if it would wait too long or the queue is full, DeadlineExceeded if its deadline passed.
        """
        line = self._line(model)
        self._check_ttft(line, terms, tokens, now_s)
        evicted = self._make_room(line, terms, now_s)
        entry = WaitingRequest(item, terms, tokens, now_s, now_s)
        line.tier(self._classes[terms.priority]).add(entry)
        self._track(line, entry)
        return evicted

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
        """Puts a dispatched request back at the front of its tier. Its wait counts from `since_s`."""
        self.remove(item)
        line, hold_s = self._line(model), 0.0 if refusal is None else REFUSED_HOLD_S
        entry = WaitingRequest(item, terms, tokens, since_s, now_s + hold_s, refusal, has_begun=refusal is None)
        line.tier(self._classes[terms.priority]).put_first(entry)
        self._track(line, entry)

    # ---- out

    def dispatch(self, now_s: float, place: Callable[[Item], bool], prefillers: Callable[[str], int]) -> None:
        """Passes the next request of each line to `place`, and goes on while `place` returns True.

        `prefillers` gives the number of workers that prefill for a model; 0 if none of them takes requests.
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
            # Time without a worker must not lower the measured rate.
            line.rate.set_waiting(now_s, bool(workers and line.regular))

    def oversized_batch(self) -> list[Item]:
        """The batch prompts longer than the dispatch budget that prefill while requests of other classes wait."""
        if not any(line.batch_tokens and line.regular for line in self._lines.values()):
            return []
        return [
            item
            for item, each in self._prefilling.items()
            if each.batch and each.tokens > self._budget_tokens and each.line.regular
        ]

    def first_token(self, item: Item, now_s: float) -> None:
        """The prompt of a dispatched request is computed."""
        if (done := self._end_prefill(item)) is not None:
            done.line.rate.first_token(done.tokens, now_s)

    def remove(self, item: Item) -> None:
        """Forgets a request that ended, or whose attempt ended. Idempotent."""
        self._end_prefill(item)
        if (found := self._waiting.pop(item, None)) is not None:
            line, entry = found
            line.tier(self._classes[entry.priority]).remove(entry)

    def expire(self, now_s: float) -> list[tuple[Item, TandemError]]:
        """Removes and returns the requests that timed out or can no longer meet their deadline, with their errors."""
        expired: list[tuple[Item, TandemError]] = []
        while (next_s := self._earliest_expiry_s()) is not None and next_s <= now_s:
            _, _, entry = heapq.heappop(self._expiries)
            line, _ = self._waiting[entry.item]
            due_s = self._expiry_s(line, entry)
            if due_s > now_s:  # the pool has become faster
                heapq.heappush(self._expiries, (due_s, next(self._order), entry))
                continue
            expired.append((entry.item, self._expiry_error(line, entry, now_s)))
            self.remove(entry.item)
        return expired

    def next_due_s(self, now_s: float) -> float | None:
        """The next time a wait or a hold ends. None if nothing waits."""
        heads = [tier.head() for line in self._lines.values() for tier in line.tiers]
        due = [head.hold_until_s for head in heads if head is not None and head.hold_until_s > now_s]
        if (next_s := self._earliest_expiry_s()) is not None:
            due.append(next_s)
        return min(due, default=None)

    # ---- inside

    def _dispatch_tier(
        self,
        line: ModelQueue[Item],
        tier: FairTurns[WaitingRequest[Item]],
        now_s: float,
        place: Callable[[Item], bool],
    ) -> None:
        batch = tier is line.batch
        while (entry := tier.head()) is not None and entry.hold_until_s <= now_s:
            if not line.has_room(entry, batch=batch):
                return
            line.start(entry.tokens, batch=batch)
            self._prefilling[entry.item] = _Prefilling(line, entry.tokens, batch)
            if not place(entry.item):
                self._end_prefill(entry.item)
                return
            if self._is_waiting(entry):  # false if it ended during `place`
                del self._waiting[entry.item]
                tier.take(entry)

    def _end_prefill(self, item: Item) -> _Prefilling[Item] | None:
        found = self._prefilling.pop(item, None)
        if found is not None:
            found.line.stop(found.tokens, batch=found.batch)
        return found

    def _check_ttft(self, line: ModelQueue[Item], terms: RequestTerms, tokens: int, now_s: float) -> None:
        spec = self._classes[terms.priority]
        limits_s: list[tuple[float, Refusal]] = []
        if terms.deadline_s is not None:
            left_s = terms.deadline_s - now_s
            limits_s.append((left_s, Refusal.DEADLINE))
            if left_s <= 0:
                self.refusals[spec.name, Refusal.DEADLINE] += 1
                raise DeadlineExceeded("the deadline of the request passed before it was queued")
        if spec.ttft_slo_s is not None:
            limits_s.append((SLO_SHARE * spec.ttft_slo_s, Refusal.SLO))
        predicted_s = line.predicted_ttft_s(spec, terms.tenant, tokens) if limits_s else None
        if predicted_s is None:
            return
        limit_s, refusal = min(limits_s)
        if predicted_s > limit_s:
            self.refusals[spec.name, refusal] += 1
            slo = f"{SLO_SHARE:.0%} of ttft_slo_s of class {spec.name!r}"
            reason = "its deadline" if refusal is Refusal.DEADLINE else slo
            raise OverloadedError(
                f"expected a first token within {limit_s:.3g} s ({reason}); "
                f"predicted {predicted_s:.3g} s behind the queued requests; "
                "retry later",
                retry_after_s=min(max(SHORTEST_RETRY_S, predicted_s - limit_s), LONGEST_RETRY_S),
            )

    def _make_room(self, line: ModelQueue[Item], terms: RequestTerms, now_s: float) -> list[tuple[Item, TandemError]]:
        """If the queue is full, evicts the newest request of the tenant with most; batch classes first.

        Raises OverloadedError if no tenant has more queued than this one.
        """
        if len(self) < self._max_queued:
            return []
        spec = self._classes[terms.priority]
        share = (line.tier(spec).count(spec.name, terms.tenant) + 1) / spec.weight
        full = f"the queue is full ({self._max_queued} requests, router.max_queued_requests); retry later"
        retry_s = self._retry_after_s(line, now_s)
        lines = ((each, one) for each in self._lines.values() for one in each.tiers)
        longest = max(
            (
                (one is each.batch, count / weight, entry)
                for each, one in lines
                for weight, count, entry in one.tenant_queues()
            ),
            key=lambda found: found[:2],
            default=None,
        )
        if longest is None or longest[:2] <= (spec.batch, share):
            self.refusals[spec.name, Refusal.QUEUE_FULL] += 1
            raise OverloadedError(full, retry_after_s=retry_s)
        entry = longest[2]
        self.refusals[entry.priority, Refusal.PUSHED_OUT] += 1
        self.remove(entry.item)
        return [(entry.item, OverloadedError(full, retry_after_s=retry_s))]

    def _expiry_s(self, line: ModelQueue[Item], entry: WaitingRequest[Item]) -> float:
        """When the wait ends: the timeout of its class, or the last moment at which the prefill can still be done by
        the TTFT objective and by the deadline."""
        return min(due_s for due_s, _ in self._limits_s(line, entry))

    def _limits_s(self, line: ModelQueue[Item], entry: WaitingRequest[Item]) -> list[tuple[float, Refusal]]:
        limits_s = [(entry.since_s + self._timeouts_s[entry.priority], Refusal.TIMEOUT)]
        least_s, slo_s = line.least_s(entry.tokens), self._classes[entry.priority].ttft_slo_s
        if slo_s is not None and not entry.has_begun:
            limits_s.append((entry.since_s + max(0.0, slo_s - least_s), Refusal.SLO))
        if entry.terms.deadline_s is not None:
            limits_s.append((entry.terms.deadline_s - least_s, Refusal.DEADLINE))
        return limits_s

    def _expiry_error(self, line: ModelQueue[Item], entry: WaitingRequest[Item], now_s: float) -> TandemError:
        waited = f"waited {now_s - entry.since_s:.3g} s in the queue"
        _, refusal = min(self._limits_s(line, entry))
        self.refusals[entry.priority, refusal] += 1
        if refusal is Refusal.DEADLINE:
            return DeadlineExceeded(f"{waited}; its deadline can no longer be met")
        if line.worker_seen_s is None or line.worker_seen_s < entry.since_s:
            return NoWorker(
                f"{waited}; no decode worker for model {line.model!r} was ready", retry_after_s=NO_WORKER_RETRY_S
            )
        retry_s = self._retry_after_s(line, now_s)
        if entry.refusal is not None:
            return type(entry.refusal)(
                f"{waited}; a worker last refused it: {entry.refusal.message}", retry_after_s=retry_s
            )
        missed = "" if refusal is Refusal.TIMEOUT else f"; the TTFT objective of class {entry.priority!r} is missed"
        return OverloadedError(f"{waited}; no worker had room{missed}", retry_after_s=retry_s)

    def _retry_after_s(self, line: ModelQueue[Item], now_s: float) -> float:
        """The wait of the line's head: a new request waits at least that long."""
        return min(max(MIN_RETRY_AFTER_S, line.longest_wait_s(now_s)), LONGEST_RETRY_S)

    def _track(self, line: ModelQueue[Item], entry: WaitingRequest[Item]) -> None:
        self._waiting[entry.item] = (line, entry)
        heapq.heappush(self._expiries, (self._expiry_s(line, entry), next(self._order), entry))
        if len(self._expiries) > 2 * len(self._waiting) + SPARE_EXPIRIES:  # mostly entries that left
            self._expiries = [due for due in self._expiries if self._is_waiting(due[2])]
            heapq.heapify(self._expiries)

    def _earliest_expiry_s(self) -> float | None:
        while self._expiries and not self._is_waiting(self._expiries[0][2]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def _is_waiting(self, entry: WaitingRequest[Item]) -> bool:
        found = self._waiting.get(entry.item)
        return found is not None and found[1] is entry

    def _line(self, model: str) -> ModelQueue[Item]:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = ModelQueue(model, list(self._classes.values()))
        return line
