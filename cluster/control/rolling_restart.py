"""Restarts every worker, and if asked every router, one after another, while the others serve: an operation of the
controller, not of a caller.

The record tells how far it is, so the next controller goes on with it. A worker is restarted if its epoch is not the
recorded one, a router if its number of restarts is not, so none is restarted twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from cluster.control.record import RestartRecord
from cluster.control.routers import Routers
from cluster.control.scaling.pool_scaler import RESUME_ATTEMPTS, RESUME_DELAY_S, PoolScaler
from cluster.control.workers import Workers
from cluster.tasks import count_failure
from tandem.errors import ConfigError, TandemError
from tandem.v1 import cluster_pb2

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class RollingRestart:
    """`record`: the last one, under way or over; at a take-over, of the controller before. `note`: keeps it."""

    def __init__(
        self, workers: Workers, routers: Routers, scaler: PoolScaler, note: Callable[[], Awaitable[None]]
    ) -> None:
        self.record: RestartRecord | None = None
        self._workers = workers
        self._routers = routers
        self._scaler = scaler
        self._note = note
        self._task: asyncio.Task[None] | None = None

    async def begin(self, model_name: str, *, move: bool, routers: bool = False) -> None:
        """Returns when it is recorded. An empty name: the workers of all models, but for those that were given up.
        `routers`: these too, and first.

        Raises ConfigError for an unknown model, or if a restart is under way.
        """
        before = self.record
        if before is not None and not before.is_over:
            done, count = len(before.restarted) + len(before.left), len(before.epochs) + len(before.routers)
            what = "routers and workers" if before.routers else "workers"
            raise ConfigError(
                f"a restart of {count} {what} is under way, {done} of them are done: wait for its end "
                "(`tandem restart --watch`)"
            )
        models = [self._workers.model(model_name)] if model_name else self._workers.models
        slots = [slot for model in models for slot in self._workers.slots_of(model)]
        slots.sort(key=lambda slot: (slot.model.spec.served_name, slot.role != "prefill", slot.worker_id))
        epochs = {slot.worker_id: slot.epoch for slot in slots}
        counts = {slot.name: slot.restarts for slot in self._routers.slots} if routers else {}
        self.record = RestartRecord(restart_id=secrets.token_hex(8), epochs=epochs, move=move, routers=counts)
        try:
            await self._note()
        except BaseException:
            self.record = before
            raise
        self.resume()

    def resume(self) -> None:
        """Goes on with the recorded one, if it is not over."""
        if self.record is not None and not self.record.is_over:
            self._task = asyncio.create_task(self._run(self.record))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def status(self) -> cluster_pb2.RollingRestart:
        if (record := self.record) is None:
            return cluster_pb2.RollingRestart()
        return cluster_pb2.RollingRestart(
            restart_id=record.restart_id,
            router_ids=record.routers,
            worker_ids=record.epochs,
            restarted=record.restarted,
            left=record.left,
            is_over=record.is_over,
            failure=record.failure,
        )

    async def _run(self, record: RestartRecord) -> None:
        restarted, left, failure = list(record.restarted), list(record.left), ""
        try:
            for name, restarts in record.routers.items():
                if name not in restarted:
                    await self._tried(name, partial(self._routers.restart, name, restarts))
                    restarted.append(name)
                    self._changed(record, restarted, left)
            for worker_id, epoch in record.epochs.items():
                if worker_id not in (*restarted, *left):
                    restart = partial(self._scaler.restart, worker_id, epoch, move=record.move)
                    is_there = await self._tried(worker_id, restart)  # or it left the cluster
                    (restarted if is_there else left).append(worker_id)
                    self._changed(record, restarted, left)
        except TandemError as error:
            failure = error.message
            log.warning("the rolling restart ended before its end: %s", failure)
        self._changed(record, restarted, left, is_over=True, failure=failure)

    async def _tried(self, name: str, restart: Callable[[], Awaitable[Result]]) -> Result:
        """Raises TandemError."""
        for attempt in range(1, RESUME_ATTEMPTS + 1):
            try:
                return await restart()
            except TandemError:
                raise
            except Exception as error:  # as Ray's, which may be restarting
                what = f"{name} could not be restarted (attempt {attempt} of {RESUME_ATTEMPTS})"
                count_failure("rolling restart", what)
                last = error
                await asyncio.sleep(RESUME_DELAY_S)
        raise TandemError(f"{name} could not be restarted: {last}")

    def _changed(self, record: RestartRecord, restarted: list[str], left: list[str], **end: object) -> None:
        update = {"restarted": tuple(restarted), "left": tuple(left)} | end
        self.record = record.model_copy(update=update)
        self._workers.on_change()
