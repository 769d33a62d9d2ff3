"""All workers the router knows, each with its link and the router's own account of what it gave it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.policies.types import Candidate
from router.prefix_index.mirror import WorkerKey
from router.worker_client import WorkerLink
from tandem.config import Role
from tandem.v1 import cluster_pb2

log = logging.getLogger(__name__)

_ROLES = {cluster_pb2.ROLE_PREFILL: Role.PREFILL, cluster_pb2.ROLE_DECODE: Role.DECODE}


@dataclass(slots=True)
class Account:
    """What this router has on a worker now."""

    prefill_tokens: int = 0
    requests: int = 0


@dataclass(slots=True)
class Worker:
    link: WorkerLink
    role: Role
    account: Account
    listed: bool = True  # in the directory; otherwise it takes nothing new

    @property
    def key(self) -> WorkerKey:
        return self.link.key

    def candidate(self, cached_tokens: int) -> Candidate:
        load, info = self.link.load, self.link.info
        running = load.running_requests + load.waiting_requests if load is not None else 0
        total = load.blocks.total if load is not None else info.total_blocks
        free = load.blocks.free + load.blocks.cached if load is not None else total
        waiting_tokens = load.waiting_tokens if load is not None else 0
        return Candidate(
            worker_id=self.key.worker_id,
            epoch=self.key.epoch,
            cached_tokens=cached_tokens,
            dispatched_tokens=self.account.prefill_tokens,
            # Several routers may use it: its own report counts where it is more than ours.
            outstanding_tokens=max(self.account.prefill_tokens, waiting_tokens),
            running_requests=max(self.account.requests, running),
            free_blocks=free,
            total_blocks=total,
            reaches=self.link.reaches,
        )


class Fleet:
    """Reconciles links with the directory. `on_change` is called when a worker comes, goes, or reports room."""

    def __init__(self, router_id: str, on_change: Callable[[], None]) -> None:
        self._router_id = router_id
        self._on_change = on_change
        self._workers: dict[WorkerKey, Worker] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_load = on_change  # called when a worker reports its load, which it does with every step

    def set_directory(self, infos: Sequence[cluster_pb2.WorkerInfo]) -> None:
        listed = {WorkerKey(info.worker_id, info.epoch): info for info in infos}
        for key, info in listed.items():
            role = _ROLES.get(info.role)
            if key in self._workers:
                self._workers[key].listed = True
            elif role is None:
                log.warning("worker of unknown role left out", extra={"worker": info.worker_id})
            else:
                link = WorkerLink(info, self._router_id, self)
                self._workers[key] = Worker(link, role, Account())
                link.start()
        for key, worker in self._workers.items():
            worker.listed = key in listed
        self.sweep()
        self._on_change()

    def keys(self) -> list[WorkerKey]:
        return [worker.key for worker in self._workers.values() if worker.listed]

    def worker(self, worker_id: str, epoch: int) -> Worker | None:
        return self._workers.get(WorkerKey(worker_id, epoch))

    def ready(self, model: str, role: Role) -> list[Worker]:
        """Workers that can take a request now."""
        return [
            worker
            for worker in self._workers.values()
            if worker.role is role and worker.listed and worker.link.ready and worker.link.info.model == model
        ]

    def count_ready(self, role: Role) -> int:
        return sum(worker.role is role and worker.listed and worker.link.ready for worker in self._workers.values())

    def max_model_tokens(self, model: str) -> int | None:
        """The shortest context of the model's decode workers; None while none is known."""
        limits = [
            worker.link.info.max_model_tokens
            for worker in self._workers.values()
            if worker.link.info.model == model and worker.role is Role.DECODE and worker.link.info.max_model_tokens
        ]
        return min(limits, default=None)

    def link_changed(self, link: WorkerLink) -> None:
        self.sweep()
        self._on_change()

    def load_changed(self, link: WorkerLink) -> None:
        self.on_load()

    async def close(self) -> None:
        workers, self._workers = list(self._workers.values()), {}
        await asyncio.gather(*(worker.link.close() for worker in workers), *self._closing)

    def sweep(self) -> None:
        """Closes links to workers that left the directory, once their last request is over."""
        for key, worker in list(self._workers.items()):
            if not worker.listed and (worker.link.idle or not worker.link.ready):
                del self._workers[key]
                task = asyncio.create_task(worker.link.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
