"""Recent events for the dashboard: workers that joined or left, ejections, migrations. Bounded.

Pure apart from the wall clock, which only stamps events.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from router.prefix_index.mirror import WorkerKey
from router.workers.fleet import Fleet
from router.workers.health import EjectReason, HealthState
from tandem.config.model import Role

MAX_EVENTS = 200
SAME_WITHIN_S = 10.0


class EventKind(StrEnum):
    WORKER_JOINED = "worker_joined"
    WORKER_LEFT = "worker_left"
    WORKER_LOST = "worker_lost"  # still listed, but its link broke
    WORKER_HEALTH = "worker_health"
    MIGRATION = "migration"  # requests went back to the queue
    HANDOFF_FAILED = "handoff_failed"
    ROUTER = "router"
    SCALING = "scaling"  # the autoscaler changed the ratio of the pools, or decided not to


class Severity(StrEnum):
    INFO = "info"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(slots=True)
class DashboardEvent:
    """An event, or `times` equal events in a short time, with the times of the first and the last."""

    kind: EventKind
    severity: Severity
    subject: str  # a worker, a router, a pool
    text: str
    first_unix_s: float
    last_unix_s: float
    times: int = 1


class EventLog:
    """Equal events within SAME_WITHIN_S are merged: a worker lost with 1,000 requests is one line."""

    def __init__(self) -> None:
        self._events: deque[DashboardEvent] = deque(maxlen=MAX_EVENTS)

    def note(self, kind: EventKind, severity: Severity, subject: str, text: str) -> None:
        now_s = time.time()
        for known in reversed(self._events):
            if now_s - known.last_unix_s > SAME_WITHIN_S:
                break
            if (known.kind, known.subject, known.text) == (kind, subject, text):
                known.times += 1
                known.last_unix_s = now_s
                return
        self._events.append(DashboardEvent(kind, severity, subject, text, now_s, now_s))

    def latest(self) -> Iterable[DashboardEvent]:
        """All events, newest first."""
        return reversed(self._events)


@dataclass(frozen=True, slots=True)
class _WorkerState:
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
    """Logs the changes among the workers since the last update."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._known: dict[WorkerKey, _WorkerState] = {}
        self._ejected: Counter[tuple[Role, EjectReason]] = Counter()

    def update(self, fleet: Fleet) -> None:
        now = {
            each.key: _WorkerState(each.role, each.link.ready, fleet.health.state(each.key))
            for each in fleet.workers()
            if each.listed
        }
        reasons = self._new_reasons(fleet.health.ejected)
        for key, state in now.items():
            self._compare(key, self._known.get(key), state, reasons)
        for key in self._known.keys() - now.keys():
            self._log.note(EventKind.WORKER_LEFT, Severity.WARNING, key.worker_id, "left")
        # A worker joins when it is first ready.
        self._known = {key: state for key, state in now.items() if state.ready or key in self._known}

    def _compare(
        self, key: WorkerKey, before: _WorkerState | None, now: _WorkerState, reasons: dict[Role, str]
    ) -> None:
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
        """Reasons for ejections since the last update, by role."""
        new = ejected - self._ejected
        self._ejected = Counter(ejected)
        return {
            role: f" ({', '.join(sorted({reason for other, reason in new if other is role}))})"
            for role in {role for role, _ in new}
        }
