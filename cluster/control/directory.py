"""The directory of ready workers, which routers and workers follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from kvtransfer.session.reshard import check_compatible, reshard_plan
from tandem.checkpoint.adapter import Adapter
from tandem.errors import IncompatiblePools, IncompatibleVersions
from tandem.rpc.directory import directory_changes
from tandem.v1 import cluster_pb2


class Directory:
    """Every change increments the version. Followers see the latest version; they may skip intermediate ones."""

    def __init__(self) -> None:
        self._workers: dict[str, cluster_pb2.WorkerInfo] = {}
        self._places: dict[str, cluster_pb2.WorkerPlace] = {}
        self._autoscaler_decisions: dict[str, int] = {}
        self._adapters: dict[str, dict[Adapter, bool]] = {}  # of each model; whether they are served
        self._version = 1
        self._current: cluster_pb2.Directory | None = None  # this version, once it was asked for
        self._changes: dict[int, cluster_pb2.Directory] = {}  # to it, by the version they change
        self._changed = asyncio.Event()

    def snapshot(self) -> cluster_pb2.Directory:
        """Shared by all who ask for this version: do not change it."""
        if self._current is None:
            self._current = cluster_pb2.Directory(
                version=self._version,
                workers=self._workers.values(),
                places=self._places.values(),
                autoscaler_decisions=self._autoscaler_decisions,
                adapters=self.listed_adapters(),
            )
        return self._current

    def set_autoscaler_decisions(self, counts: Mapping[str, int]) -> None:
        """Counts by action, which the routers export as metrics."""
        self._autoscaler_decisions = dict(counts)
        self._bump()

    def set_adapters(self, model: str, served: Sequence[Adapter], loading: Sequence[Adapter] = ()) -> None:
        """Workers load both, and routers serve the first."""
        wanted = {each: True for each in served} | {each: False for each in loading if each not in served}
        if self._adapters.get(model, {}) != wanted:
            self._adapters[model] = wanted
            self._bump()

    def adapters(self, model: str) -> tuple[Adapter, ...]:
        """Those that are served."""
        return tuple(each for each, is_served in self._adapters.get(model, {}).items() if is_served)

    def listed_adapters(self) -> list[cluster_pb2.ModelAdapter]:
        return [
            cluster_pb2.ModelAdapter(
                model=model,
                name=each.name,
                fingerprint=each.fingerprint,
                folder=str(each.folder),
                served=is_served,
            )
            for model, adapters in self._adapters.items()
            for each, is_served in adapters.items()
        ]

    def put_place(self, place: cluster_pb2.WorkerPlace) -> None:
        """Adds or updates a worker that should exist, ready or not, with its number of restarts."""
        if self._places.get(place.worker_id) != place:
            self._places[place.worker_id] = place
            self._bump()

    def remove_place(self, worker_id: str) -> None:
        if self._places.pop(worker_id, None) is not None:
            self._bump()

    def put(self, worker: cluster_pb2.WorkerInfo) -> None:
        """Raises IncompatiblePools or IncompatibleVersions if it cannot exchange KV with its model's other workers."""
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
        """Changes the role or drain mode of a ready worker. Does nothing for any other worker."""
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

    async def follow(self, *, takes_changes: bool = False) -> AsyncIterator[cluster_pb2.Directory]:
        """Yields the current directory, then each newer one: whole, or as changes of the one before."""
        sent: cluster_pb2.Directory | None = None
        while True:
            if sent is None or self._version != sent.version:
                before, sent = sent, self.snapshot()
                yield sent if before is None or not takes_changes else self._changes_of(before)
                continue
            changed = self._changed
            await changed.wait()

    def _changes_of(self, before: cluster_pb2.Directory) -> cluster_pb2.Directory:
        """Computed once for all followers that have that version."""
        if before.version not in self._changes:
            self._changes[before.version] = directory_changes(before, self.snapshot())
        return self._changes[before.version]

    def _bump(self) -> None:
        self._version += 1
        self._current = None
        self._changes.clear()
        self._changed.set()
        self._changed = asyncio.Event()


def _check_pair(a: cluster_pb2.WorkerInfo, b: cluster_pb2.WorkerInfo) -> None:
    try:
        check_compatible(a.layout, b.layout)
        if a.role != b.role:
            prefill, decode = (a, b) if a.role == cluster_pb2.ROLE_PREFILL else (b, a)
            reshard_plan(prefill.layout.tp, decode.layout.tp, a.layout.kv_heads)
    except (IncompatiblePools, IncompatibleVersions) as error:
        raise type(error)(f"{a.worker_id} and {b.worker_id} of {a.model}: {error.message}") from None
