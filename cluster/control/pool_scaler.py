"""Changes a running cluster: pools of another size, workers out or through a new life, without losing a request.

One change at a time; a second waits for the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster.control.pools import ChangeRole, Leave, Member, Start, plan_change
from cluster.control.worker_slot import WorkerSlot, WorkerState
from cluster.spec.resolve import ResolvedModel
from tandem.config.spec import Role
from tandem.errors import ConfigError, TandemError, UnavailableError
from tandem.v1 import cluster_pb2

if TYPE_CHECKING:
    from cluster.control.controller import Controller

log = logging.getLogger(__name__)

POLL_S = 0.1
STARTS_AT_ONCE = 4  # workers load their weights from the same disk, beside others that serve
ROLES = {Role.PREFILL: cluster_pb2.ROLE_PREFILL, Role.DECODE: cluster_pb2.ROLE_DECODE}


class LiveRatio:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        return self._one_at_a_time.locked()

    def sizes(self, model_name: str) -> tuple[int, int]:
        """Prefill and decode workers that there are."""
        found = [slot.role for slot in self._slots(self._model(model_name))]
        return found.count(Role.PREFILL), found.count(Role.DECODE)

    async def scale(self, model_name: str, prefill: int | None, decode: int | None) -> tuple[str, ...]:
        """Returns what was done, in words. Nothing stops before what is to start serves.

        Raises:
            ConfigError: the model, a number, or what the devices cannot hold; or a new worker cannot start.
            UnavailableError: a new worker did not become ready in time. Those that did stay.
        """
        async with self._one_at_a_time:
            model = self._model(model_name)
            members = [await self._member(slot) for slot in self._slots(model)]
            now = {role: sum(member.role is role for member in members) for role in Role}
            actions = plan_change(
                members,
                now[Role.PREFILL] if prefill is None else prefill,
                now[Role.DECODE] if decode is None else decode,
                same_width=model.spec.prefill.tp == model.spec.decode.tp,
                name_of=self._controller.name_prefix(model),
            )
            starts = [each for each in actions if isinstance(each, Start)]
            await self._controller.check_room(model, [each.role for each in starts])
            for changed in (each for each in actions if isinstance(each, ChangeRole)):
                log.info("%s", changed)
                self._controller.change_role(changed.worker_id, changed.role)
            await self._start_all(model, starts)
            for leaving in (each for each in actions if isinstance(each, Leave)):
                log.info("%s", leaving)
                await self.empty(self._controller.slots[leaving.worker_id], move=True)
                await self._controller.remove_worker(leaving.worker_id)
            return tuple(str(action) for action in actions)

    async def drain(self, worker_id: str, *, restart: bool, move: bool) -> None:
        """Empties a worker, then ends it, or starts its next life and waits for that.

        Raises ConfigError when it is unknown, or the last decode worker and not to be restarted.
        """
        async with self._one_at_a_time:
            slot = self._controller.slots.get(worker_id)
            if slot is None:
                known = ", ".join(sorted(self._controller.slots))
                raise ConfigError(f"worker_id: expected one of {known}, got {worker_id!r}", field="worker_id")
            alone = [each for each in self._slots(slot.model) if each.role is Role.DECODE] == [slot]
            if alone and not restart:
                raise ConfigError(f"worker_id: {worker_id} is the model's last decode worker", field="worker_id")
            await self.empty(slot, move=move and not alone)
            if restart:
                epoch = slot.epoch
                slot.next_life("restarted by request")
                await self._until(
                    lambda: slot.epoch != epoch and slot.state is WorkerState.READY,
                    f"{worker_id} to be ready again",
                    slot,
                )
            else:
                await self._controller.remove_worker(worker_id)

    async def _start_all(self, model: ResolvedModel, starts: Sequence[Start]) -> None:
        """Side by side. Those that start stay when others fail; the error that is raised then tells of each."""
        room = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start(each: Start) -> None:
            async with room:
                log.info("%s", each)
                await self._start(model, each)

        results = await asyncio.gather(*(start(each) for each in starts), return_exceptions=True)
        failures = [each for each in results if each is not None]
        if not failures:
            return
        first = failures[0]
        if isinstance(first, TandemError):
            stay = ", ".join(each.worker_id for each, failure in zip(starts, results, strict=True) if failure is None)
            first.message = "; ".join(map(str, failures)) + (f" (started and stays: {stay})" if stay else "")
        raise first

    async def _start(self, model: ResolvedModel, start: Start) -> None:
        slot = await self._controller.add_worker(start.worker_id, start.role, model)
        try:
            await self._until(lambda: slot.state is WorkerState.READY, f"{start.worker_id} to be ready", slot)
        except BaseException:  # also when the caller went away: what never served leaves nothing behind
            await self._controller.remove_worker(start.worker_id)
            raise

    async def empty(self, slot: WorkerSlot, *, move: bool) -> None:
        """Takes nothing new from here on; returns when it has nothing left, or is not there any more. After
        control.drain_timeout_s what is left goes on elsewhere as after the loss of a worker."""
        drain = cluster_pb2.DRAIN_MOVE if move else cluster_pb2.DRAIN_FINISH
        self._set_drain(slot, drain)
        try:
            await self._until_empty(slot)
        except BaseException:  # the caller went away: the worker serves on
            self._set_drain(slot, cluster_pb2.DRAIN_NONE)
            raise

    def _set_drain(self, slot: WorkerSlot, drain: cluster_pb2.Drain.ValueType) -> None:
        slot.drain = drain
        self._controller.directory.change(slot.worker_id, drain=drain)

    async def _until_empty(self, slot: WorkerSlot) -> None:
        # A router may have sent something just before it heard of it.
        await asyncio.sleep(2 * POLL_S)
        deadline_s = asyncio.get_running_loop().time() + self._controller.spec.control.drain_timeout_s
        while await self._is_busy(slot):
            if asyncio.get_running_loop().time() > deadline_s:
                log.warning("%s was not empty in time: what is left goes on elsewhere", slot.worker_id)
                return
            await asyncio.sleep(POLL_S)

    async def _is_busy(self, slot: WorkerSlot) -> bool:
        state = await self._controller.worker_state(slot)
        if state is None:  # it may only be slow to answer; one that is gone is not ready any more
            return slot.state is WorkerState.READY
        load = state.load
        requests = load.running_requests + load.waiting_requests + load.reserved_requests
        return bool(requests or load.blocks.leased or load.blocks.in_use)

    async def _until(self, done: Callable[[], bool], what: str, slot: WorkerSlot) -> None:
        timeout_s = self._controller.spec.control.start_timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not done():
            if slot.is_given_up:
                raise ConfigError(f"{slot.worker_id} cannot start: {slot.reason}")
            if asyncio.get_running_loop().time() > deadline_s:
                raise UnavailableError(f"control.start_timeout_s: waited {timeout_s:g} s for {what}")
            await asyncio.sleep(POLL_S)

    def _model(self, name: str) -> ResolvedModel:
        models = {model.spec.served_name: model for model in self._controller.models}
        if not name and len(models) == 1:
            return next(iter(models.values()))
        if name not in models:
            raise ConfigError(f"model: expected one of {', '.join(models)}, got {name!r}", field="model")
        return models[name]

    def _slots(self, model: ResolvedModel) -> list[WorkerSlot]:
        return [slot for slot in self._controller.slots.values() if slot.model is model and not slot.is_given_up]

    async def _member(self, slot: WorkerSlot) -> Member:
        state = await self._controller.worker_state(slot)
        load = None if state is None else state.load
        busy = 0 if load is None else load.running_requests + load.waiting_requests + load.reserved_requests
        return Member(slot.worker_id, slot.role, busy)
