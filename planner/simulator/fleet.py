"""The workers of a simulated cluster, and the router's view of them.

Simulated workers of a pool are alike, so they share one set of measured paces. What differs (queue, batch, cache) is in
each candidate. In a large pool, a decision looks at a shortlist: the workers with the longest cached prefixes and the
least loaded ones, since no other worker can win.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter

from planner.shared_host import BusyCores
from planner.simulator.events import EventLoop
from planner.simulator.least_loaded import LeastLoadedIndex
from planner.simulator.measurements import IntervalHistogram
from planner.simulator.requests import MODEL
from planner.simulator.setup import Setup
from planner.simulator.worker import SimWorker, WorkerHost
from router.policies.pace import Pace
from router.policies.pace_estimates import Estimates, WorkerEstimates
from router.policies.types import Candidate
from router.prefix_index.mirror import WorkerKey
from router.workers.load_account import Charge
from tandem.config.model import Role
from tandem.engine.api import Capability
from tandem.rpc.identity import WorkerEpoch

WHOLE_POOL = 24  # in pools up to this size, every worker is a candidate
SHORTLIST = 20  # candidates of a larger pool: simulated p90 TTFT within 2 % of the whole pool's
SHORTLIST_BY_PREFIX = 12  # of these, chosen for the longest cached prefixes
_NO_TRANSFER_TIMES: Mapping[WorkerEpoch, float] = {}  # pairs of workers are not measured separately


class SimFleet:
    def __init__(self, setup: Setup, loop: EventLoop, host: WorkerHost, intervals: IntervalHistogram) -> None:
        self._setup, self._loop, self._host, self._intervals = setup, loop, host, intervals
        self.cores = None if setup.host is None else BusyCores(setup.host, loop)
        self.estimates = Estimates(loop)
        self._pace: dict[Role, WorkerEstimates] = {role: self.estimates.worker(MODEL, role) for role in Role}
        self.workers: dict[str, SimWorker] = {}
        self._by_role: dict[Role, dict[str, SimWorker]] = {role: {} for role in Role}
        self._least_loaded = {role: LeastLoadedIndex() for role, pool in setup.pools() if pool.workers > WHOLE_POOL}
        self.lost_workers: list[SimWorker] = []  # epochs that ended
        for role, pool in setup.pools():
            for number in range(pool.workers):
                self.start(f"{role.value}-{number}", role, epoch=1)

    def start(self, worker_id: str, role: Role, epoch: int) -> SimWorker:
        pool = self._setup.decode if role is Role.DECODE or self._setup.prefill is None else self._setup.prefill
        key = WorkerKey(worker_id, epoch)
        worker = SimWorker(key, role, pool, self._setup, self._loop, self._host, self._intervals, self.cores)
        self.workers[worker_id] = self._by_role[role][worker_id] = worker
        self.note(worker)
        return worker

    def set_roles(self, prefill: int) -> None:
        """Makes `prefill` workers prefill and the others decode. The least loaded change; their requests continue."""
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            wanted = prefill if role is Role.PREFILL else len(self.workers) - prefill
            least_loaded = sorted(self._by_role[other].values(), key=lambda worker: worker.running_requests)
            for worker in least_loaded[: max(0, wanted - self.size(role))]:
                self._remove_from_pool(worker)
                self._by_role[role][worker.key.worker_id] = worker
                worker.role = role
                self.note(worker)

    def lose(self, worker: SimWorker) -> None:
        worker.lose()
        self.lost_workers.append(worker)
        del self.workers[worker.key.worker_id]
        self._remove_from_pool(worker)

    def role(self, role: Role) -> Iterable[SimWorker]:
        return self._by_role[role].values()

    def size(self, role: Role) -> int:
        return len(self._by_role[role])

    def find(self, key: WorkerKey) -> SimWorker | None:
        worker = self.workers.get(key.worker_id)
        return worker if worker is not None and worker.key == key else None

    def pace(self, role: Role) -> WorkerEstimates:
        return self._pace[role]

    def note(self, worker: SimWorker) -> None:
        """Call this when the worker's load may have changed."""
        least_loaded = self._least_loaded.get(worker.role)
        if least_loaded is not None and not worker.lost:
            load = worker.running_requests if worker.role is Role.DECODE else worker.outstanding_tokens
            least_loaded.note(worker.key.worker_id, load)

    # --- the view of the router's placer and observers ---------------------------------------------------------------

    def candidates(
        self, model: str, role: Role, cached_blocks: Mapping[WorkerKey, int], block_tokens: int
    ) -> list[Candidate]:
        pool = self._by_role[role]
        chosen = self._shortlist(role, cached_blocks) if role in self._least_loaded else pool.values()
        pace = self._pace[role].pace()
        return [self._candidate(worker, cached_blocks.get(worker.key, 0) * block_tokens, pace) for worker in chosen]

    def candidate(self, key: WorkerKey, cached_tokens: int) -> Candidate | None:
        worker = self.find(key)
        return None if worker is None else self._candidate(worker, cached_tokens, self._pace[worker.role].pace())

    def count(self, model: str, role: Role) -> int:
        return len(self._by_role[role])

    def pool_blocks(self, model: str) -> list[int]:
        """One entry: the workers of a pool are alike."""
        return [self._setup.decode.kv_tokens // self._setup.block_tokens] if self._by_role[Role.DECODE] else []

    def lacks(self, model: str) -> list[frozenset[Capability]]:
        """Nothing: its engines are ours."""
        return []

    def has_adapter(self, key: WorkerKey, adapter: str) -> bool:
        return False  # adapters are not simulated

    def serves_adapter(self, model: str, adapter: str) -> bool:
        return False

    def some_have_adapter(self, model: str, adapter: str) -> bool:
        return False

    def ready_ids(self, model: str, role: Role) -> frozenset[str]:
        return frozenset(self._by_role[role])

    def answer_tokens(self, model: str) -> int:
        return self.estimates.answer_tokens(model)

    def leaving(self) -> tuple[WorkerKey, ...]:
        return ()  # drains are not simulated

    def add_charge(self, key: WorkerKey, charge: Charge) -> bool:
        worker = self.find(key)
        if worker is not None:
            worker.account.add(charge)
            self.note(worker)
        return worker is not None

    def remove_charge(self, key: WorkerKey, charge: Charge) -> None:
        if (worker := self.find(key)) is not None:
            worker.account.remove(charge)
            self.note(worker)

    def prefilled(self, key: WorkerKey, charge: Charge) -> None:
        if (worker := self.find(key)) is not None:
            worker.account.prefilled(charge)

    def estimates_of(self, key: WorkerKey) -> WorkerEstimates | None:
        worker = self.find(key)
        return None if worker is None else self._pace[worker.role]

    def running_requests_of(self, key: WorkerKey) -> int:
        worker = self.find(key)
        return 0 if worker is None else worker.running_requests

    def _candidate(self, worker: SimWorker, cached_tokens: int, pace: Pace) -> Candidate:
        account, load = worker.account, worker.load()
        worker_id, epoch = worker.key
        # Positional arguments: keywords take twice as long, and no object is made more often.
        return Candidate(
            worker_id,
            epoch,
            cached_tokens,
            account.prefill_tokens,
            load.waiting_tokens + account.unreported_tokens,
            load.requests + account.unreported_requests,
            max(0, load.available_blocks - account.unreported_blocks),
            load.total_blocks,
            None,
            pace,
            _NO_TRANSFER_TIMES,
            worker.bounds_steps,
        )

    def _remove_from_pool(self, worker: SimWorker) -> None:
        del self._by_role[worker.role][worker.key.worker_id]
        if (least_loaded := self._least_loaded.get(worker.role)) is not None:
            least_loaded.forget(worker.key.worker_id)

    def _shortlist(self, role: Role, cached_blocks: Mapping[WorkerKey, int]) -> list[SimWorker]:
        pool = self._by_role[role]
        chosen: dict[str, None] = {}
        for key, _ in sorted(cached_blocks.items(), key=itemgetter(1), reverse=True):
            worker = pool.get(key.worker_id)
            if worker is not None and worker.key == key:
                chosen[key.worker_id] = None
                if len(chosen) == SHORTLIST_BY_PREFIX:
                    break
        self._least_loaded[role].extend(chosen, SHORTLIST)
        return [pool[worker_id] for worker_id in chosen]
