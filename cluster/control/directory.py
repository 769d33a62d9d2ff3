"""Who is in the cluster now. Pure bookkeeping plus a wake-up for those who follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from kvtransfer.session.reshard import check_compatible, reshard_plan
from tandem.errors import IncompatiblePools
from tandem.v1 import cluster_pb2


class Directory:
    """The ready workers. Every change has a version and reaches every follower, though not every version does."""

    def __init__(self) -> None:
        self._workers: dict[str, cluster_pb2.WorkerInfo] = {}
        self._places: dict[str, cluster_pb2.WorkerPlace] = {}
        self._autoscaler_decisions: dict[str, int] = {}
        self._version = 1
        self._changed = asyncio.Event()

    def snapshot(self) -> cluster_pb2.Directory:
        return cluster_pb2.Directory(
            version=self._version,
            workers=self._workers.values(),
            places=self._places.values(),
            autoscaler_decisions=self._autoscaler_decisions,
        )

    def set_autoscaler_decisions(self, counts: Mapping[str, int]) -> None:
        """By action: the routers show them among their metrics."""
        self._autoscaler_decisions = dict(counts)
        self._bump()

    def put_place(self, place: cluster_pb2.WorkerPlace) -> None:
        """A worker that there should be, and how often it was started again."""
        if self._places.get(place.worker_id) != place:
            self._places[place.worker_id] = place
            self._bump()

    def remove_place(self, worker_id: str) -> None:
        if self._places.pop(worker_id, None) is not None:
            self._bump()

    def put(self, worker: cluster_pb2.WorkerInfo) -> None:
        """Raises IncompatiblePools when its KV cannot be exchanged with a worker of the same model."""
        for other in self._workers.values():
            if other.model == worker.model and other.worker_id != worker.worker_id:
                _check_pair(worker, other)
        self._workers[worker.worker_id] = worker
        self._bump()

    def change(
        self,
        worker_id: str,
        *,
        role: cluster_pb2.Role.ValueType | None = None,
        drain: cluster_pb2.Drain.ValueType | None = None,
    ) -> None:
        """Another role, another way to drain, of a ready worker; nothing of one that is not."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        changed = cluster_pb2.WorkerInfo()
        changed.CopyFrom(worker)
        changed.role = worker.role if role is None else role
        changed.drain = worker.drain if drain is None else drain
        if changed != worker:
            self.put(changed)

    def remove(self, worker_id: str) -> None:
        if self._workers.pop(worker_id, None) is not None:
            self._bump()

    def get(self, worker_id: str) -> cluster_pb2.WorkerInfo | None:
        return self._workers.get(worker_id)

    async def follow(self) -> AsyncIterator[cluster_pb2.Directory]:
        """The directory now, and after every change."""
        told = 0
        while True:
            if self._version != told:
                told = self._version
                yield self.snapshot()
                continue
            changed = self._changed
            await changed.wait()

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _check_pair(a: cluster_pb2.WorkerInfo, b: cluster_pb2.WorkerInfo) -> None:
    try:
        check_compatible(a.layout, b.layout)
        if a.role != b.role:
            prefill, decode = (a, b) if a.role == cluster_pb2.ROLE_PREFILL else (b, a)
            reshard_plan(prefill.layout.tp, decode.layout.tp, a.layout.kv_heads)
    except IncompatiblePools as error:
        raise IncompatiblePools(f"{a.worker_id} and {b.worker_id} of {a.model}: {error.message}") from None
