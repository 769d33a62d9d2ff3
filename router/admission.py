"""The router's waiting room: bounded, first come first served per model. Pure; the dispatcher passes the time.

A request waits while its pool has no room or is restarting, and is refused when that takes longer than the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.errors import NoWorker, OverloadedError, TandemError

Item = TypeVar("Item")

MIN_RETRY_AFTER_S = 1.0
REFUSED_HOLD_S = 0.05  # between two tries of a request that workers could not take


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Item]):
    item: Item
    since_s: float
    hold_until_s: float
    refusal: TandemError | None = None  # the last answer of a worker that could not take it


class _Line(Generic[Item]):
    """The queue of one model."""

    def __init__(self) -> None:
        self.waiting: deque[_Waiting[Item]] = deque()
        self.worker_seen_s: float | None = None  # when a decode worker was last there


class Admission(Generic[Item]):
    def __init__(self, *, max_queued_requests: int, queue_timeout_s: float) -> None:
        self._max_queued = max_queued_requests
        self._timeout_s = queue_timeout_s
        self._lines: dict[str, _Line[Item]] = {}

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def queued(self, model: str) -> int:
        return len(self._line(model).waiting)

    def offer(self, model: str, item: Item, now_s: float) -> None:
        """Queues a request at the end. Raises OverloadedError when the queue is full."""
        if len(self) >= self._max_queued:
            raise OverloadedError(
                f"expected at most {self._max_queued} queued requests, and so many are waiting; retry later",
                retry_after_s=self.retry_after_s(model, now_s),
            )
        self._line(model).waiting.append(_Waiting(item, now_s, now_s))

    def put_back(
        self, model: str, item: Item, *, since_s: float, now_s: float, refusal: TandemError | None
    ) -> None:
        """A request that had been dispatched waits again, first in line. It waits since `since_s`."""
        hold_s = 0.0 if refusal is None else REFUSED_HOLD_S
        self._line(model).waiting.appendleft(_Waiting(item, since_s, now_s + hold_s, refusal))

    def withdraw(self, model: str, item: Item) -> bool:
        """Takes a request out; False when it was not waiting."""
        waiting = self._line(model).waiting
        for entry in waiting:
            if entry.item is item:
                waiting.remove(entry)
                return True
        return False

    def items(self) -> list[Item]:
        return [entry.item for line in self._lines.values() for entry in line.waiting]

    def worker_seen(self, model: str, now_s: float) -> None:
        """A decode worker of the model is there."""
        self._line(model).worker_seen_s = now_s

    def dispatch(self, now_s: float, place: Callable[[Item], bool]) -> None:
        """Offers the first in each line to `place`, and the next as long as that says it took one."""
        for line in self._lines.values():
            while line.waiting and line.waiting[0].hold_until_s <= now_s:
                entry = line.waiting.popleft()
                if not place(entry.item):
                    line.waiting.appendleft(entry)
                    break

    def expire(self, now_s: float) -> list[tuple[Item, TandemError]]:
        """Takes out those that have waited too long, each with the reason."""
        expired: list[tuple[Item, TandemError]] = []
        for model, line in self._lines.items():
            kept: deque[_Waiting[Item]] = deque()
            for entry in line.waiting:
                if now_s - entry.since_s < self._timeout_s:
                    kept.append(entry)
                else:
                    expired.append((entry.item, self._timeout_error(model, line, entry, now_s)))
            line.waiting = kept
        return expired

    def next_due_s(self, now_s: float) -> float | None:
        """When time alone changes something: a wait ends or a hold is over. None while nothing waits."""
        due: list[float] = []
        for line in self._lines.values():
            due.extend(entry.since_s + self._timeout_s for entry in line.waiting)
            if line.waiting and line.waiting[0].hold_until_s > now_s:
                due.append(line.waiting[0].hold_until_s)
        return min(due, default=None)

    def retry_after_s(self, model: str, now_s: float) -> float:
        """As long as the first in line has waited: what a newcomer may expect at the least."""
        waiting = self._line(model).waiting
        waited_s = now_s - waiting[0].since_s if waiting else 0.0
        return min(max(MIN_RETRY_AFTER_S, waited_s), self._timeout_s)

    def _timeout_error(self, model: str, line: _Line[Item], entry: _Waiting[Item], now_s: float) -> TandemError:
        waited = f"waited {self._timeout_s:g} s in the queue"
        if line.worker_seen_s is None or line.worker_seen_s < entry.since_s:
            return NoWorker(f"{waited}, and there was no decode worker for model {model!r}", retry_after_s=5.0)
        retry_s = self.retry_after_s(model, now_s)
        if entry.refusal is not None:
            return type(entry.refusal)(f"{waited}; the last refusal: {entry.refusal.message}", retry_after_s=retry_s)
        return OverloadedError(f"{waited}, and no worker had room", retry_after_s=retry_s)

    def _line(self, model: str) -> _Line[Item]:
        return self._lines.setdefault(model, _Line())
