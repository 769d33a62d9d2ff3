"""What happened lately, for people: workers that came and went, ejections, requests that moved on. Bounded. Pure but
for the wall clock, which nothing is computed with."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from router.prefix_index.mirror import WorkerKey
from router.workers.fleet import Fleet
from router.workers.health import EjectReason, HealthState
from tandem.config.spec import Role

MAX_EVENTS = 200
SAME_WITHIN_S = 10.0


class EventKind(StrEnum):
    WORKER_JOINED = "worker_joined"
    WORKER_LEFT = "worker_left"
    WORKER_LOST = "worker_lost"  # it is listed, but its link broke
    WORKER_HEALTH = "worker_health"
    MIGRATION = "migration"  # requests that went on elsewhere, or began anew
    HANDOFF_FAILED = "handoff_failed"
    ROUTER = "router"
    SCALING = "scaling"  # the ratio of the pools was changed, or it was decided not to


class Severity(StrEnum):
    INFO = "info"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(slots=True)
class Event:
    """`times`: so often within a short time; the first and the last of them."""

    kind: EventKind
    severity: Severity
    subject: str  # a worker, a router, a pool
    text: str
    first_unix_s: float
    last_unix_s: float
    times: int = 1


class EventLog:
    """The same again within SAME_WITHIN_S is counted, not listed: a worker lost with 1,000 requests is one line."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def note(self, kind: EventKind, severity: Severity, subject: str, text: str) -> None:
        now_s = time.time()
        for known in reversed(self._events):
            if now_s - known.last_unix_s > SAME_WITHIN_S:
                break
            if (known.kind, known.subject, known.text) == (kind, subject, text):
                known.times += 1
                known.last_unix_s = now_s
                return
        self._events.append(Event(kind, severity, subject, text, now_s, now_s))

    def latest(self) -> Iterable[Event]:
        """The newest first."""
        return reversed(self._events)


@dataclass(frozen=True, slots=True)
class _Seen:
    role: Role
    ready: bool
    health: HealthState


_SEVERITIES = {
    HealthState.HEALTHY: Severity.GOOD,
    HealthState.SUSPECT: Severity.WARNING,
    HealthState.EJECTED: Severity.BAD,
    HealthState.PROBATION: Severity.WARNING,
}


class FleetWatch:
    """Notes what changed among the workers since the last look."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._seen: dict[WorkerKey, _Seen] = {}
        self._ejected: Counter[tuple[Role, EjectReason]] = Counter()

    def update(self, fleet: Fleet) -> None:
        now = {
            each.key: _Seen(each.role, each.link.ready, fleet.health.state(each.key))
            for each in fleet.workers()
            if each.listed
        }
        reasons = self._new_reasons(fleet.health.ejected)
        for key, seen in now.items():
            self._compare(key, self._seen.get(key), seen, reasons)
        for key in self._seen.keys() - now.keys():
            self._log.note(EventKind.WORKER_LEFT, Severity.WARNING, key.worker_id, "left")
        # Who was never ready has not come yet.
        self._seen = {key: seen for key, seen in now.items() if seen.ready or key in self._seen}

    def _compare(self, key: WorkerKey, before: _Seen | None, now: _Seen, reasons: dict[Role, str]) -> None:
        worker = key.worker_id
        if before is None:
            if now.ready:
                self._log.note(EventKind.WORKER_JOINED, Severity.GOOD, worker, "joined")
            return
        if before.ready != now.ready:
            text = "link is back" if now.ready else "link lost"
            severity = Severity.GOOD if now.ready else Severity.BAD
            self._log.note(EventKind.WORKER_LOST, severity, worker, text)
        if before.health is not now.health:
            reason = reasons.get(now.role, "") if now.health is HealthState.EJECTED else ""
            text = f"{before.health} → {now.health}{reason}"
            self._log.note(EventKind.WORKER_HEALTH, _SEVERITIES[now.health], worker, text)

    def _new_reasons(self, ejected: Counter[tuple[Role, EjectReason]]) -> dict[Role, str]:
        """Why workers of a role were ejected since the last look."""
        new = ejected - self._ejected
        self._ejected = Counter(ejected)
        return {
            role: f" ({', '.join(sorted({reason for other, reason in new if other is role}))})"
            for role in {role for role, _ in new}
        }
