"""Which workers may get requests. Stalled, failing and slow workers are ejected for a while.

    healthy ⇄ suspect → ejected → probation → healthy
       └────────────────↗   ↖────────┘

Pure: facts and the time go in, actions come out; `router.probes.health_watch` executes them. A worker without progress
is always ejected, because it serves no request, and asked by canaries until it answers. Its requests leave it only if
another worker can take them: if all are slow, as on a busy host, moving requests between them would only use up their
migrations. A failing or slow worker is ejected only if at least half of its pool still admits requests; the last worker
of a pool is never ejected for these reasons. If stalls leave fewer than half, those that only failed or were slow admit
requests again (Envoy's panic threshold).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from router.prefix_index.mirror import WorkerKey
from tandem.config.model import Role
from tandem.errors import InternalError

ADMITTING_SHARE = 0.5  # of each pool: so many workers admit requests, unless more of them have stalled
TIME_GRAIN_S = 1e-6  # sums of times are not exact


class HealthState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # takes requests; after failures, it gets a canary
    EJECTED = "ejected"  # takes none
    PROBATION = "probation"  # takes none until it passes a canary; then its limit doubles every second


class EjectReason(StrEnum):
    """A metric label."""

    STALLED = "stalled"
    FAILURES = "failures"
    SLOW = "slow"
    CANARY = "canary"


_EDGES = {
    HealthState.HEALTHY: {HealthState.SUSPECT, HealthState.EJECTED},
    HealthState.SUSPECT: {HealthState.HEALTHY, HealthState.EJECTED},
    HealthState.EJECTED: {HealthState.PROBATION},
    HealthState.PROBATION: {HealthState.HEALTHY, HealthState.EJECTED},
}


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Latencies are seconds per output token (decode) and per 64 prompt tokens (prefill)."""

    suspect_failures: int = 3  # in a row
    eject_failures: int = 5
    slow_factor: float = 4.0  # times the median of its peers
    slow_floor_s: float = 0.02  # and at least this much slower
    slow_samples: int = 24
    first_ejection_s: float = 5.0  # after a stall: `step_s`
    longest_ejection_s: float = 120.0
    longest_stall_s: float = 4.0  # of an ejection after a stall: back within 5 s of the first good step
    probation_requests: int = 16  # at once; above this limit the worker is healthy
    step_s: float = 1.0  # between two canaries, and between two increases of the limit
    hopeless_factor: float = 6.0  # times the allowed silence: requests leave even if no other worker can take them


@dataclass(frozen=True, slots=True)
class Pool:
    model: str
    role: Role


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a worker with outstanding work has shown no progress, and how long it may."""

    key: WorkerKey
    silent_s: float
    limit_s: float
    stepped_at_s: float | None = None  # the last step or answer that it reported

    @property
    def left_s(self) -> float:
        """Until it is too long; 0: it is."""
        left_s = self.limit_s - self.silent_s
        return left_s if left_s > TIME_GRAIN_S else 0.0


@dataclass(frozen=True, slots=True)
class MigrateRequests:
    """The worker is stalled, and others can take its requests: migrate them."""

    key: WorkerKey
    silent_s: float


@dataclass(frozen=True, slots=True)
class SendCanary:
    """The caller sends a canary and reports its result to `HealthBoard.canary_ended`."""

    key: WorkerKey


HealthAction = MigrateRequests | SendCanary


@dataclass(slots=True)
class WorkerHealth:
    """The state of one worker; only `_enter` changes it."""

    pool: Pool
    state: HealthState = HealthState.HEALTHY
    is_up: bool = False  # its link is connected
    failures: int = 0  # in a row
    is_silent: bool = False  # why it is suspect: no progress
    is_stalled: bool = False  # why it is ejected or on probation: no progress
    admitted: int = 0  # in probation: the limit of requests at once
    until_s: float = 0.0  # end of the ejection
    ejected_s: float = 0.0
    ejections: int = 0  # recent ones; sets the length of the next
    since_s: float = 0.0  # start of this state
    next_step_s: float = 0.0
    canary_out: bool = False
    latency_s: float = 0.0  # moving mean
    samples: int = 0

    def suspect(self, now_s: float, *, is_silent: bool) -> None:
        self._enter(HealthState.SUSPECT, now_s)
        self.is_silent, self.next_step_s = is_silent, now_s

    def clear(self, now_s: float) -> None:
        self._enter(HealthState.HEALTHY, now_s)
        self.is_silent = False

    def eject(self, now_s: float, rules: HealthRules, reason: EjectReason, *, is_alone: bool) -> None:
        """Ejects for twice as long as last time, up to a limit; a long healthy period resets that.

        A stalled worker is retried every step until it answers. So is one without peers, because no other worker could
        serve.
        """
        if self.state is HealthState.HEALTHY and now_s - self.since_s > rules.longest_ejection_s:
            self.ejections = 0
        still_stalls = self.is_stalled and reason is EjectReason.CANARY
        self.is_stalled = still_stalls or reason is EjectReason.STALLED
        first_s = rules.step_s if self.is_stalled else rules.first_ejection_s
        longest_s = rules.longest_stall_s if self.is_stalled else rules.longest_ejection_s
        for_s = first_s if still_stalls else min(first_s * 2**self.ejections, longest_s)
        self._enter(HealthState.EJECTED, now_s)
        self.ejected_s = now_s
        self.until_s = now_s + (rules.step_s if is_alone else for_s)
        if not still_stalls:
            self.ejections = min(self.ejections + 1, 32)
        self.failures = self.samples = 0
        self.is_silent = False

    def begin_probation(self, now_s: float) -> None:
        self._enter(HealthState.PROBATION, now_s)
        self.admitted, self.next_step_s = 0, now_s

    def admit_more(self, now_s: float, rules: HealthRules) -> None:
        """Doubles the limit after a success in probation, at most once per step."""
        if now_s < self.next_step_s and self.admitted:
            return
        self.next_step_s = now_s + rules.step_s
        self.admitted = max(1, 2 * self.admitted)
        if self.admitted > rules.probation_requests:
            self._enter(HealthState.HEALTHY, now_s)

    @property
    def is_in(self) -> bool:
        """Whether it takes requests if others do too."""
        match self.state:
            case HealthState.SUSPECT:
                return not self.is_silent
            case HealthState.PROBATION:
                return self.admitted > 0
            case _:
                return self.state is HealthState.HEALTHY

    def add_latency(self, latency_s: float) -> None:
        self.samples += 1
        self.latency_s += (latency_s - self.latency_s) / min(self.samples, 16)

    def _enter(self, state: HealthState, now_s: float) -> None:
        if state not in _EDGES[self.state]:
            raise InternalError(f"worker health: {self.state} cannot become {state}")
        self.state, self.since_s = state, now_s
        self.is_stalled = self.is_stalled and state is not HealthState.HEALTHY


def _nothing(key: WorkerKey, role: Role, reason: EjectReason) -> None:
    pass


@dataclass(slots=True)
class HealthBoard:
    """The health of all workers of a router. Facts about unknown workers are ignored. `on_eject`: a hook."""

    rules: HealthRules = HealthRules()
    ejected: Counter[tuple[Role, EjectReason]] = field(default_factory=Counter)  # ejections since the start
    changes: int = 0  # incremented when the set of workers that may take requests changes
    on_eject: Callable[[WorkerKey, Role, EjectReason], None] = _nothing
    _workers: dict[WorkerKey, WorkerHealth] = field(default_factory=dict)

    # ---- members

    def add(self, key: WorkerKey, model: str, role: Role) -> None:
        self._workers.setdefault(key, WorkerHealth(Pool(model, role)))

    def remove(self, key: WorkerKey) -> None:
        self._workers.pop(key, None)

    def set_up(self, key: WorkerKey, *, is_up: bool) -> None:
        if (worker := self._workers.get(key)) is not None:
            worker.is_up = is_up

    def state(self, key: WorkerKey) -> HealthState:
        worker = self._workers.get(key)
        return HealthState.HEALTHY if worker is None else worker.state

    def admits(self, key: WorkerKey, requests: int) -> bool:
        """Whether the worker may get another request; it has `requests` of this router."""
        worker = self._workers.get(key)
        if worker is None or worker.state is HealthState.HEALTHY:
            return True
        if worker.state is HealthState.SUSPECT:
            peers = self._peers(key, worker.pool)
            return not (worker.is_silent and any(peer.state is HealthState.HEALTHY for peer in peers))
        if not worker.is_in:
            return not worker.is_stalled and self._panics(worker.pool)
        peers = self._peers(key, worker.pool)
        return requests < worker.admitted or not any(peer.state is HealthState.HEALTHY for peer in peers)

    def _panics(self, pool: Pool) -> bool:
        """Whether fewer than half of the pool's workers take requests."""
        workers = [each for each in self._workers.values() if each.pool == pool and each.is_up]
        return sum(each.is_in for each in workers) < ADMITTING_SHARE * len(workers)

    def all_healthy(self) -> bool:
        return all(worker.state is HealthState.HEALTHY for worker in self._workers.values())

    def counts(self) -> Counter[tuple[Role, HealthState]]:
        """Workers with a connected link, by role and state."""
        return Counter((worker.pool.role, worker.state) for worker in self._workers.values() if worker.is_up)

    # ---- facts

    def succeeded(self, key: WorkerKey, now_s: float, latency_s: float | None) -> None:
        """The worker completed its part of a request. `latency_s` None: not measured."""
        worker = self._workers.get(key)
        if worker is None:
            return
        worker.failures = 0
        if worker.state is HealthState.SUSPECT and not worker.is_silent:
            worker.clear(now_s)
        elif worker.state is HealthState.PROBATION and worker.admitted:
            self._admit_more(worker, now_s)
        if latency_s is not None:
            worker.add_latency(latency_s)
            if worker.samples % self.rules.slow_samples == 0 and self._is_outlier(key, worker):
                self._eject(key, worker, EjectReason.SLOW, now_s)

    def failed(self, key: WorkerKey, now_s: float) -> None:
        """A request failed with an error that the worker may have caused."""
        worker = self._workers.get(key)
        if worker is None or worker.state is HealthState.EJECTED:
            return
        worker.failures += 1
        if worker.state is HealthState.PROBATION:
            self._fall_back(key, worker, EjectReason.FAILURES, now_s)
        elif worker.failures >= self.rules.eject_failures:
            self._eject(key, worker, EjectReason.FAILURES, now_s)
        elif worker.failures >= self.rules.suspect_failures and worker.state is HealthState.HEALTHY:
            worker.suspect(now_s, is_silent=False)

    def canary_ended(self, key: WorkerKey, now_s: float, *, passed: bool | None) -> None:
        """Takes the result of a canary. `passed` None: it could not be sent, or the worker refused it."""
        worker = self._workers.get(key)
        if worker is None:
            return
        worker.canary_out, worker.next_step_s = False, max(worker.next_step_s, now_s)
        if passed is None:
            worker.next_step_s = now_s + self.rules.step_s
        elif passed and worker.state is HealthState.PROBATION:
            self._admit_more(worker, now_s)
        elif worker.state is HealthState.PROBATION and worker.admitted and not self._peers(key, worker.pool):
            worker.next_step_s = now_s + self.rules.step_s  # its steps told more than a canary behind its requests
        elif passed and worker.state is HealthState.SUSPECT:
            worker.clear(now_s)  # keeps the failure count: only a real request resets it
        elif worker.state is HealthState.PROBATION:
            self._fall_back(key, worker, EjectReason.CANARY, now_s)
        elif worker.state is HealthState.SUSPECT:
            worker.next_step_s = now_s + self.rules.step_s
            self._eject(key, worker, EjectReason.CANARY, now_s)

    # ---- time

    def check(self, now_s: float, silences: Iterable[Silence]) -> list[HealthAction]:
        """The actions due at `now_s`. `silences`: one per worker with outstanding work that reports steps."""
        actions: list[HealthAction] = []
        seen = {silence.key: silence for silence in silences}
        for key, worker in self._workers.items():
            self._judge_silence(key, worker, seen.get(key), now_s)
        for key, worker in self._workers.items():
            if (silence := seen.get(key)) is not None and self._is_emptied(key, worker, silence):
                actions.append(MigrateRequests(key, silence.silent_s))
            if worker.state is HealthState.EJECTED and now_s >= worker.until_s and worker.is_up:
                worker.begin_probation(now_s)
            if silence is not None and self._has_stepped(worker, silence):
                self._admit_more(worker, now_s)  # a canary would wait behind its requests
            if self._needs_canary(worker) and now_s >= worker.next_step_s:
                worker.canary_out = True
                actions.append(SendCanary(key))
        return actions

    def _has_stepped(self, worker: WorkerHealth, silence: Silence) -> bool:
        """Whether a stalled worker on probation goes on."""
        asked = worker.state is HealthState.PROBATION and worker.is_stalled and not worker.admitted
        return asked and silence.stepped_at_s is not None and silence.stepped_at_s > worker.ejected_s

    def _judge_silence(self, key: WorkerKey, worker: WorkerHealth, silence: Silence | None, now_s: float) -> None:
        if silence is not None and not silence.left_s:
            asked = worker.state is HealthState.PROBATION and not worker.admitted  # a canary will tell
            if worker.state is not HealthState.EJECTED and not asked:
                self._eject_now(key, worker, EjectReason.STALLED, now_s)
        elif silence is not None and silence.silent_s > silence.limit_s / 2:
            if worker.state is HealthState.HEALTHY:
                worker.suspect(now_s, is_silent=True)
        elif worker.state is HealthState.SUSPECT and worker.is_silent:
            worker.clear(now_s)
            self.changes += 1

    def _is_emptied(self, key: WorkerKey, worker: WorkerHealth, silence: Silence) -> bool:
        """Whether the worker is stalled and its requests are better off elsewhere."""
        if silence.left_s:
            return False
        is_hopeless = silence.silent_s > self.rules.hopeless_factor * silence.limit_s
        return is_hopeless or any(peer.is_in for peer in self._peers(key, worker.pool))

    def _needs_canary(self, worker: WorkerHealth) -> bool:
        suspect = worker.state is HealthState.SUSPECT and not worker.is_silent
        return (suspect or worker.state is HealthState.PROBATION) and worker.is_up and not worker.canary_out

    # ---- decisions

    def _eject(self, key: WorkerKey, worker: WorkerHealth, reason: EjectReason, now_s: float) -> bool:
        """Ejects the worker unless more than half of its pool would admit none. Returns whether it did."""
        pool = [each for each in self._workers.values() if each.pool == worker.pool and each.is_up]
        out = sum(not (each.is_in or each.is_silent) for each in pool if each is not worker) + 1
        is_allowed = worker.state is not HealthState.EJECTED and len(pool) - out >= ADMITTING_SHARE * len(pool)
        if is_allowed:
            self._eject_now(key, worker, reason, now_s)
        return is_allowed

    def _fall_back(self, key: WorkerKey, worker: WorkerHealth, reason: EjectReason, now_s: float) -> None:
        """Ends a failed probation. A worker that may not be ejected waits for the next canary."""
        if not self._eject(key, worker, reason, now_s):
            worker.admitted, worker.next_step_s = 0, now_s + self.rules.step_s

    def _eject_now(self, key: WorkerKey, worker: WorkerHealth, reason: EjectReason, now_s: float) -> None:
        worker.eject(now_s, self.rules, reason, is_alone=not self._peers(key, worker.pool))
        self.ejected[worker.pool.role, reason] += 1
        self.changes += 1
        self.on_eject(key, worker.pool.role, reason)

    def _admit_more(self, worker: WorkerHealth, now_s: float) -> None:
        worker.admit_more(now_s, self.rules)
        self.changes += 1

    def _is_outlier(self, key: WorkerKey, worker: WorkerHealth) -> bool:
        peers = [
            peer.latency_s
            for peer in self._peers(key, worker.pool)
            if peer.samples >= self.rules.slow_samples and peer.state is not HealthState.EJECTED
        ]
        if not peers:
            return False
        usual_s = median(peers)
        return worker.latency_s > max(usual_s * self.rules.slow_factor, usual_s + self.rules.slow_floor_s)

    def _peers(self, key: WorkerKey, pool: Pool) -> list[WorkerHealth]:
        return [each for other, each in self._workers.items() if other != key and each.pool == pool and each.is_up]
