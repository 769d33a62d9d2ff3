"""All workers the router knows, each with its link and the router's own account of what it gave it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.policies.estimates import Estimates, WorkerEstimates
from router.policies.types import Candidate
from router.prefix_index.mirror import WorkerKey
from router.workers.account import Account
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
    """Reconciles links with the directory. `on_change` is called when a worker comes, goes, or reports room."""

    def __init__(
        self,
        router_id: str,
        estimates: Estimates,
        on_change: Callable[[], None],
        health: HealthBoard | None = None,
        on_work: Callable[[], None] = lambda: None,
        tls: ClusterTls | None = None,
    ) -> None:
        """`on_work` is called when a worker that had nothing of ours to do gets something."""
        self.estimates = estimates
        self.health = health or HealthBoard()
        self._router_id = router_id
        self._on_change = on_change
        self._on_work = on_work
        self._tls = tls
        self._workers: dict[WorkerKey, Worker] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_load = on_change  # called when a worker reports its load, which it does with every step

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
        self._on_change()

    def _update(self, worker: Worker, role: Role, info: cluster_pb2.WorkerInfo) -> None:
        """A worker that changes its role keeps its link and what runs on it; its paces and its health begin anew."""
        worker.drain = info.drain
        if worker.role is not role:
            worker.role, worker.estimates = role, self.estimates.worker(info.model, role)
            self.health.remove(worker.key)
            self.health.add(worker.key, info.model, role)
            self.health.set_up(worker.key, is_up=worker.link.ready)

    def leaving(self) -> list[Worker]:
        """Those whose requests are to go on elsewhere."""
        return [worker for worker in self._workers.values() if worker.drain == cluster_pb2.DRAIN_MOVE and worker.listed]

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def keys(self) -> list[WorkerKey]:
        return [worker.key for worker in self._workers.values() if worker.listed]

    def worker(self, worker_id: str, epoch: int) -> Worker | None:
        return self._workers.get(WorkerKey(worker_id, epoch))

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
        self._on_change()

    def load_changed(self, link: WorkerLink) -> None:
        self.on_load()

    def changed(self) -> None:
        """Another set of workers may take requests."""
        self._on_change()

    def work_began(self, link: WorkerLink) -> None:
        self._on_work()

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
