"""Drains the workers of a host that is about to stop: its pod is deleted, or its Ray node drained."""

from __future__ import annotations

import asyncio
import logging

from cluster.backends.protocol import Backend
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.workers import Workers
from cluster.tasks import count_failure

log = logging.getLogger(__name__)

POLL_S = 0.5


class NodeDrainer:
    """`run` ends only when cancelled. It does not wait for other changes: the host does not wait for them either."""

    def __init__(self, workers: Workers, scaler: PoolScaler, backend: Backend, poll_s: float = POLL_S) -> None:
        self._workers = workers
        self._scaler = scaler
        self._backend = backend
        self._poll_s = poll_s
        self._draining: set[str] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for worker_id in await self._workers_to_drain():
                    if worker_id not in self._draining:
                        self._draining.add(worker_id)
                        tasks.create_task(self._drain(worker_id))
                await asyncio.sleep(self._poll_s)

    async def _workers_to_drain(self) -> frozenset[str]:
        try:
            return await self._backend.draining()
        except Exception:  # the next poll may succeed
            count_failure(
                "node drainer", "cannot read which hosts are draining; workers on them would be lost with them"
            )
            return frozenset()

    async def _drain(self, worker_id: str) -> None:
        try:
            await self._drain_and_reschedule(worker_id)
        except Exception:  # a failure with one worker must not stop the drainer
            count_failure("node drainer", f"{worker_id} could not be drained from its host")
        finally:
            self._draining.remove(worker_id)

    async def _drain_and_reschedule(self, worker_id: str) -> None:
        """Moves the worker's requests away; its next epoch starts on another host as soon as one has room."""
        if (slot := self._workers.slots.get(worker_id)) is None:
            return
        log.info("draining %s: its host is about to stop", worker_id)
        epoch = slot.epoch
        await self._scaler.empty(slot, move=True)
        if slot.epoch == epoch and self._workers.slots.get(worker_id) is slot:
            where = self._workers.where(slot.model, slot.role, worker_id)
            await self._backend.reschedule(worker_id, lambda: slot.restart("its host is about to stop"), where)
