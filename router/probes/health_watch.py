"""Monitors workers that have requests or are unhealthy, and executes the decisions of `router.workers.health`.

No timer runs while no worker has a request of this router and all workers are healthy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from router.observe.metrics.health import CanaryPurpose, CanaryResult, HealthMetrics
from router.prefix_index.mirror import WorkerKey
from router.probes.canary import Canary
from router.workers.fleet import Fleet, Worker
from router.workers.health import EjectReason, HealthState, MigrateRequests, SendCanary, Silence
from tandem.clock import Clock
from tandem.config.model import Role

log = logging.getLogger(__name__)

TICK_S = 0.25  # at most, between two looks; one is made when the first silence reaches its limit
LEAST_TICK_S = 0.001
LATE_TICK_S = 0.5  # a tick later than this says nothing about the workers: the router was busy


class HealthWatch:
    """Runs on the event loop's thread. Calls `on_change` when a different set of workers may take requests."""

    def __init__(
        self, fleet: Fleet, metrics: HealthMetrics, clock: Clock, stall_s: float, on_change: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._stall_s = stall_s
        self._on_change = on_change
        self._canaries: set[Canary] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._closed = False
        fleet.health.on_eject = _log_ejection

    def wake(self) -> None:
        """Starts the timer: a worker has requests or is unhealthy."""
        self._look_in(TICK_S)

    def _look_in(self, delay_s: float) -> None:
        if self._timer is None and not self._closed:
            self._due_s = self._clock.now_s() + delay_s
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for canary in list(self._canaries):
            canary.cancel()

    def _tick(self) -> None:
        self._timer = None
        now_s = self._clock.now_s()
        busy = [worker for worker in self._fleet.workers() if worker.link.ready and not worker.link.idle]
        late_s = now_s - self._due_s
        if late_s > LATE_TICK_S:  # frames that arrived meanwhile are still unread
            for each in busy:
                each.link.progress.excuse(late_s)
        board, changes = self._fleet.health, self._fleet.health.changes
        silences = [each for each in map(partial(self._silence, now_s), busy) if each]
        for action in board.check(now_s, silences):
            worker = self._fleet.worker(action.key.worker_id, action.key.epoch)
            match action:
                case MigrateRequests(silent_s=silent_s) if worker is not None:
                    self._fail_stuck(worker, silent_s)
                case SendCanary():
                    self._send_canary(action.key, worker)
        if board.changes != changes:
            self._on_change()
        if busy or not board.all_healthy():
            left_s = min((each.left_s for each in silences if each.left_s > 0.0), default=TICK_S)
            self._look_in(min(TICK_S, max(LEAST_TICK_S, left_s)))

    def _silence(self, now_s: float, worker: Worker) -> Silence | None:
        progress = worker.link.progress
        silent_s = progress.silent_s(now_s)
        if silent_s is None:
            return None
        limit_s = progress.limit_s(self._stall_s, worker.account.prefill_tokens)
        return Silence(worker.key, silent_s, limit_s, progress.stepped_at_s)

    def _fail_stuck(self, worker: Worker, silent_s: float) -> None:
        if worker.link.fail_requests(f"no progress for {silent_s:.1f} s"):
            fields = {"worker": worker.key.worker_id, "silent_s": round(silent_s, 3)}
            log.warning("worker is stuck: its requests migrate", extra=fields)

    def _send_canary(self, key: WorkerKey, worker: Worker | None) -> None:
        path = None if worker is None else self._path(worker)
        if worker is None or path is None:
            self._fleet.health.canary_ended(key, self._clock.now_s(), passed=None)
            return
        canary = Canary(
            worker.link.info.model,
            self._fleet,
            self._clock,
            self._stall_s,
            lambda result: self._canary_ended(key, canary, result),
        )
        self._canaries.add(canary)
        canary.start(*path)

    def _path(self, worker: Worker) -> tuple[Worker, Worker | None] | None:
        """Returns (decode, prefill): this worker and a healthy one of the other role."""
        model, health = worker.link.info.model, self._fleet.health
        role = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
        others = [other for other in self._fleet.ready(model, role) if health.state(other.key) is HealthState.HEALTHY]
        if worker.role is Role.DECODE:
            return worker, next((other for other in others if other.reaches(worker)), None)
        decode = next((other for other in others if worker.reaches(other)), None)
        return None if decode is None else (decode, worker)

    def _canary_ended(self, key: WorkerKey, canary: Canary, result: CanaryResult) -> None:
        self._canaries.discard(canary)
        self._metrics.canary(CanaryPurpose.WORKER, result)
        passed = None if result is CanaryResult.REFUSED else result is CanaryResult.PASSED
        board, changes = self._fleet.health, self._fleet.health.changes
        board.canary_ended(key, self._clock.now_s(), passed=passed)
        if board.changes != changes:
            asyncio.get_running_loop().call_soon(self._on_change)  # this may run while a frame is handled


def _log_ejection(key: WorkerKey, role: Role, reason: EjectReason) -> None:
    log.warning("worker ejected", extra={"worker": key.worker_id, "role": role.value, "reason": reason.value})
