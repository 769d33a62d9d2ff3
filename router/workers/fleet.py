"""All workers the router knows, each with its link and the router's own account of what it gave it.

The placer's view of the workers (`router.requests.placer.FleetView`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from router.policies.estimates import Estimates, WorkerEstimates
from router.policies.types import Candidate
from router.prefix_index.mirror import WorkerKey
from router.workers.account import Account, Charge
from router.workers.health import HealthBoard
from router.workers.link import WorkerLink
from tandem.config.spec import Role
from tandem.rpc.grpc_tls import ClusterTls
from tandem.v1 import cluster_pb2, worker_pb2

log = logging.getLogger(__name__)

_NO_LOAD = worker_pb2.WorkerLoad()  # of a worker that has reported none; never changed
ROLES = {cluster_pb2.ROLE_PREFILL: Role.PREFILL, cluster_pb2.ROLE_DECODE: Role.DECODE}


@dataclass(slots=True)
class Worker:
    link: WorkerLink
    role: Role
    account: Account
    estimates: WorkerEstimates
    last_prefill_s: float = 0.0  # when it was last done with a prompt of ours
    listed: bool = True  # in the directory; otherwise it takes nothing new
    drain: cluster_pb2.Drain.ValueType = cluster_pb2.DRAIN_NONE

    @property
    def key(self) -> WorkerKey:
        return self.link.key

    def reaches(self, other: Worker) -> bool:
        reaches = self.link.reaches  # None: it has not said
        return reaches is None or (other.key.worker_id, other.key.epoch) in reaches

    @property
    def running_requests(self) -> int:
        """Running or about to, whichever router they came from: its report, and what of ours it cannot know of yet."""
        self.account.acknowledge(self.link.seen_frames)
        load = self.link.load or _NO_LOAD
        reported = load.running_requests + load.waiting_requests + load.reserved_requests
        return reported + self.account.unreported_requests

    @property
    def total_blocks(self) -> int:
        """Of its KV pool; 0: it has not said."""
        return (self.link.load or _NO_LOAD).blocks.total or self.link.info.total_blocks

    def candidate(self, cached_tokens: int) -> Candidate:
        load, account = self.link.load or _NO_LOAD, self.account
        running = self.running_requests  # first: it takes note of what the report knows
        total = self.total_blocks
        free = load.blocks.free + load.blocks.cached if load.HasField("blocks") else total
        return Candidate(
            worker_id=self.key.worker_id,
            epoch=self.key.epoch,
            cached_tokens=cached_tokens,
            dispatched_tokens=account.prefill_tokens,
            outstanding_tokens=load.waiting_tokens + account.unreported_tokens,
            running_requests=running,
            free_blocks=max(0, free - account.unreported_blocks),
            total_blocks=total,
            reaches=self.link.reaches,
            pace=self.estimates.pace(),
            transfer_to=self.estimates.transfer_to,
        )


class Fleet:
    """Reconciles links with the directory.

    The hooks are set by the composition root: `on_change` runs when a worker comes, goes, or reports room; `on_load`
    when a worker reports its load, which it does with every step; `on_work` when a worker that had nothing of this
    router's to do gets something.
    """

    def __init__(
        self, router_id: str, estimates: Estimates, health: HealthBoard | None = None, tls: ClusterTls | None = None
    ) -> None:
        self.estimates = estimates
        self.health = health or HealthBoard()
        self.on_change: Callable[[], None] = _nothing
        self.on_load: Callable[[], None] = _nothing
        self.on_work: Callable[[], None] = _nothing
        self._router_id = router_id
        self._tls = tls
        self._workers: dict[WorkerKey, Worker] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set_directory(self, infos: Sequence[cluster_pb2.WorkerInfo]) -> None:
        listed = {WorkerKey(info.worker_id, info.epoch): info for info in infos}
        for key, info in listed.items():
            role = ROLES.get(info.role)
            if role is None:
                log.warning("worker of unknown role left out", extra={"worker": info.worker_id})
            elif (worker := self._workers.get(key)) is not None:
                self._update(worker, role, info)
            else:
                link = WorkerLink(info, self._router_id, self, self._tls)
                estimates = self.estimates.worker(info.model, role)
                self._workers[key] = Worker(link, role, Account(), estimates, drain=info.drain)
                self.health.add(key, info.model, role)
                link.start()
        for key, worker in self._workers.items():
            worker.listed = key in listed
        self.sweep()
        self.on_change()

    def _update(self, worker: Worker, role: Role, info: cluster_pb2.WorkerInfo) -> None:
        """A worker that changes its role keeps its link and what runs on it; its paces and its health begin anew."""
        worker.drain = info.drain
        if worker.role is not role:
            worker.role, worker.estimates = role, self.estimates.worker(info.model, role)
            self.health.remove(worker.key)
            self.health.add(worker.key, info.model, role)
            self.health.set_up(worker.key, is_up=worker.link.ready)

    def leaving(self) -> list[WorkerKey]:
        """Those whose requests are to go on elsewhere."""
        return [
            key for key, worker in self._workers.items() if worker.drain == cluster_pb2.DRAIN_MOVE and worker.listed
        ]

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def keys(self) -> list[WorkerKey]:
        return [worker.key for worker in self._workers.values() if worker.listed]

    def worker(self, worker_id: str, epoch: int) -> Worker | None:
        return self._workers.get(WorkerKey(worker_id, epoch))

    def find(self, key: WorkerKey) -> Worker | None:
        return self._workers.get(key)

    def link(self, key: WorkerKey) -> WorkerLink | None:
        worker = self._workers.get(key)
        return None if worker is None else worker.link

    def estimates_of(self, key: WorkerKey) -> WorkerEstimates | None:
        worker = self._workers.get(key)
        return None if worker is None else worker.estimates

    def running_requests_of(self, key: WorkerKey) -> int:
        worker = self._workers.get(key)
        return 0 if worker is None else worker.running_requests

    # ---- as the placer sees them

    def candidates(
        self, model: str, role: Role, cached_blocks: Mapping[WorkerKey, int], block_tokens: int
    ) -> list[Candidate]:
        return [worker.candidate(cached_blocks.get(worker.key, 0) * block_tokens) for worker in self.ready(model, role)]

    def candidate(self, key: WorkerKey, cached_tokens: int) -> Candidate | None:
        worker = self._workers.get(key)
        return None if worker is None else worker.candidate(cached_tokens)

    def count(self, model: str, role: Role) -> int:
        return len(self.ready(model, role))

    def pool_blocks(self, model: str) -> list[int]:
        return [worker.total_blocks for worker in self.ready(model, Role.DECODE)]

    def ready_ids(self, model: str, role: Role) -> frozenset[str]:
        return frozenset(worker.key.worker_id for worker in self.ready(model, role))

    def answer_tokens(self, model: str) -> int:
        return self.estimates.answer_tokens(model)

    def add_charge(self, key: WorkerKey, charge: Charge) -> bool:
        worker = self._workers.get(key)
        if worker is not None:
            worker.account.add(charge)
        return worker is not None

    def remove_charge(self, key: WorkerKey, charge: Charge) -> None:
        if (worker := self._workers.get(key)) is not None:
            worker.account.remove(charge)

    def prefilled(self, key: WorkerKey, charge: Charge) -> None:
        if (worker := self._workers.get(key)) is not None:
            worker.account.prefilled(charge)

    # ---- by state

    def ready(self, model: str, role: Role) -> list[Worker]:
        """Workers that can take a request now."""
        return [
            worker
            for worker in self._workers.values()
            if worker.role is role and worker.link.info.model == model and self._can_take(worker)
        ]

    def count_ready(self, role: Role) -> int:
        return sum(worker.role is role and self._can_take(worker) for worker in self._workers.values())

    def _can_take(self, worker: Worker) -> bool:
        usable = worker.listed and worker.link.ready and worker.drain == cluster_pb2.DRAIN_NONE
        return usable and self.health.admits(worker.key, worker.account.requests)

    def max_model_tokens(self, model: str) -> int | None:
        """The shortest context of the model's decode workers; None while none is known."""
        limits = [
            worker.link.info.max_model_tokens
            for worker in self._workers.values()
            if worker.link.info.model == model and worker.role is Role.DECODE and worker.link.info.max_model_tokens
        ]
        return min(limits, default=None)

    def link_changed(self, link: WorkerLink) -> None:
        self.health.set_up(link.key, is_up=link.ready)
        self.sweep()
        self.on_change()

    def load_changed(self, link: WorkerLink) -> None:
        self.on_load()

    def changed(self) -> None:
        """Another set of workers may take requests."""
        self.on_change()

    def work_began(self, link: WorkerLink) -> None:
        self.on_work()

    async def close(self) -> None:
        workers, self._workers = list(self._workers.values()), {}
        await asyncio.gather(*(worker.link.close() for worker in workers), *self._closing)

    def sweep(self) -> None:
        """Closes links to workers that left the directory, once their last request is over."""
        for key, worker in list(self._workers.items()):
            if not worker.listed and (worker.link.idle or not worker.link.ready):
                del self._workers[key]
                self.health.remove(key)
                task = asyncio.create_task(worker.link.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


def _nothing() -> None:
    pass
