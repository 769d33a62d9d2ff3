"""The router's workers, each with its link and an account of the requests the router gave it.

`Fleet` is also the placer's view of the workers (`router.requests.placer.FleetView`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.policies.pace_estimates import Estimates, WorkerEstimates
from router.policies.types import Candidate
from router.prefix_index.mirror import WorkerKey
from router.workers.health import HealthBoard
from router.workers.link import WorkerLink
from router.workers.load_account import Account, Charge
from tandem.config.model import Role
from tandem.engine.api import Capability
from tandem.rpc.directory import ROLE_OF
from tandem.rpc.grpc_tls import ClusterTls
from tandem.v1 import cluster_pb2, worker_pb2

log = logging.getLogger(__name__)

_NO_LOAD = worker_pb2.WorkerLoad()  # for a worker without a report; never modified


@dataclass(slots=True)
class Worker:
    link: WorkerLink
    role: Role
    account: Account
    estimates: WorkerEstimates
    last_prefill_s: float = 0.0  # when it last finished a prompt of this router
    listed: bool = True  # in the directory; otherwise it gets no new requests
    drain: cluster_pb2.Drain.ValueType = cluster_pb2.DRAIN_NONE

    @property
    def key(self) -> WorkerKey:
        return self.link.key

    def reaches(self, other: Worker) -> bool:
        reaches = self.link.reaches  # None: not reported yet
        return reaches is None or (other.key.worker_id, other.key.epoch) in reaches

    @property
    def running_requests(self) -> int:
        """Running and waiting requests of all routers: its report, plus this router's newer requests."""
        self.account.acknowledge(self.link.seen_frames)
        load = self.link.load or _NO_LOAD
        reported = load.running_requests + load.waiting_requests + load.reserved_requests
        return reported + self.account.unreported_requests

    @property
    def total_blocks(self) -> int:
        """Blocks of its KV pool; 0: not reported yet."""
        return (self.link.load or _NO_LOAD).blocks.total or self.link.info.total_blocks

    def candidate(self, cached_tokens: int) -> Candidate:
        load, account = self.link.load or _NO_LOAD, self.account
        running = self.running_requests  # first: it updates the account from the report
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
            bounds_steps=self.link.info.bounds_steps,
            lacks=self.link.lacks,
        )


class Fleet:
    """Keeps one link per worker of the directory.

    `RouterApp` sets the hooks. `on_change`: a worker was added, removed, connected or lost, or its health changed.
    `on_load`: a worker reported its load, as it does with every step. `on_work`: a worker got a request from this
    router and had none before.
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
        self._adapters: frozenset[tuple[str, str]] = frozenset()  # model and fingerprint
        self._closing: set[asyncio.Task[None]] = set()

    def set_adapters(self, adapters: Iterable[cluster_pb2.ModelAdapter]) -> None:
        """Those of the directory."""
        self._adapters = frozenset((each.model, each.fingerprint) for each in adapters if each.served)

    def set_directory(self, infos: Sequence[cluster_pb2.WorkerInfo]) -> None:
        listed = {WorkerKey(info.worker_id, info.epoch): info for info in infos}
        for key, info in listed.items():
            role = ROLE_OF.get(info.role)
            if role is None:
                log.warning("worker with an unknown role ignored", extra={"worker": info.worker_id})
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
        """A worker that changes its role keeps its link and requests; its paces and its health are reset."""
        worker.drain = info.drain
        if worker.role is not role:
            worker.role, worker.estimates = role, self.estimates.worker(info.model, role)
            self.health.remove(worker.key)
            self.health.add(worker.key, info.model, role)
            self.health.set_up(worker.key, is_up=worker.link.ready)

    def leaving(self) -> list[WorkerKey]:
        """Workers whose requests move to others."""
        return [
            key
            for key, worker in self._workers.items()
            if worker.drain == cluster_pb2.DRAIN_MOVE and worker.listed and Capability.MOVES not in worker.link.lacks
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

    # ---- the placer's view

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

    def lacks(self, model: str) -> list[frozenset[Capability]]:
        return [
            worker.link.lacks
            for worker in self._workers.values()
            if worker.listed and worker.role is Role.DECODE and worker.link.info.model == model
        ]

    def has_adapter(self, key: WorkerKey, adapter: str) -> bool:
        link = self.link(key)
        return link is not None and adapter in link.adapters

    def serves_adapter(self, model: str, adapter: str) -> bool:
        return (model, adapter) in self._adapters

    def some_have_adapter(self, model: str, adapter: str) -> bool:
        return any(
            worker.listed and worker.role is Role.DECODE and worker.link.info.model == model
            for worker in self._workers.values()
            if adapter in worker.link.adapters
        )

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
            if worker.role is role and worker.link.info.model == model and self._accepts_requests(worker)
        ]

    def count_ready(self, role: Role) -> int:
        return sum(worker.role is role and self._accepts_requests(worker) for worker in self._workers.values())

    def _accepts_requests(self, worker: Worker) -> bool:
        usable = worker.listed and worker.link.ready and worker.drain == cluster_pb2.DRAIN_NONE
        return usable and self.health.admits(worker.key, worker.account.requests)

    def max_model_tokens(self, model: str) -> int | None:
        """The shortest context among the model's decode workers; None: none is known."""
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
        """A different set of workers may take requests."""
        self.on_change()

    def work_began(self, link: WorkerLink) -> None:
        self.on_work()

    async def close(self) -> None:
        workers, self._workers = list(self._workers.values()), {}
        await asyncio.gather(*(worker.link.close() for worker in workers), *self._closing)

    def sweep(self) -> None:
        """Closes links to workers that left the directory, once their last request has ended."""
        for key, worker in list(self._workers.items()):
            if not worker.listed and (worker.link.idle or not worker.link.ready):
                del self._workers[key]
                self.health.remove(key)
                task = asyncio.create_task(worker.link.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


def _nothing() -> None:
    pass
