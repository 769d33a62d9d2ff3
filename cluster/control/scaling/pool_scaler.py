"""Changes pool sizes, drains and restarts workers of a running cluster without losing a request.

One change runs at a time; others wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from cluster.control.model_adapters import has_loaded
from cluster.control.record import DrainRecord, ScaleRecord, WorkerState
from cluster.control.scaling.pools import ChangeRole, PoolChange, PoolMember, RemoveWorker, StartWorker, plan_change
from cluster.control.worker_slot import WorkerSlot
from cluster.control.workers import Workers
from cluster.spec.resolve import ResolvedModel
from cluster.tasks import count_failure
from tandem.config.model import Role
from tandem.config.spec import ControlSpec
from tandem.errors import ConfigError, TandemError, UnavailableError
from tandem.v1 import cluster_pb2

log = logging.getLogger(__name__)

POLL_S = 0.1
RESUME_ATTEMPTS = 10
RESUME_DELAY_S = 1.0
MAX_PARALLEL_STARTS = 4  # starting workers read weights from one disk, while other workers serve


async def _no_note() -> None:
    """Keeps nothing."""


class PoolScaler:
    """`note`: keeps what is `under_way`, so that the next controller continues it."""

    def __init__(
        self,
        workers: Workers,
        control: ControlSpec,
        note: Callable[[], Awaitable[None]] = _no_note,
        poll_s: float = POLL_S,
    ) -> None:
        self.under_way: list[ScaleRecord | DrainRecord] = []  # at a take-over: of the controller before
        self._workers = workers
        self._control = control
        self._note = note
        self._poll_s = poll_s
        self._lock = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    def sizes(self, model_name: str) -> tuple[int, int]:
        """Numbers of prefill and decode workers."""
        found = [slot.role for slot in self._workers.slots_of(self._workers.model(model_name))]
        return found.count(Role.PREFILL), found.count(Role.DECODE)

    def asked_sizes(self, model: ResolvedModel) -> tuple[int, int]:
        """Numbers of prefill and decode workers that the pools were last asked to have. (0, 0) before the start."""
        for change in reversed(self.under_way):
            if isinstance(change, ScaleRecord) and change.model == model.spec.served_name:
                return change.prefill, change.decode
        found = list(self._workers.roles(model).values())
        return found.count(Role.PREFILL), found.count(Role.DECODE)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Changes wait meanwhile: workers of the spec are being placed."""
        async with self._lock:
            yield

    async def scale(self, model_name: str, prefill: int | None, decode: int | None) -> tuple[str, ...]:
        """Returns one sentence for each change. Workers stop only after the new ones serve.

        Raises:
            ConfigError: a wrong model or number, too little room on the devices, or a new worker that cannot start.
            UnavailableError: a new worker did not become ready in time. Those that did become ready stay.
        """
        async with self._lock:
            model = self._workers.model(model_name)
            members = [await self._member(slot) for slot in self._workers.slots_of(model)]
            now = {role: sum(member.role is role for member in members) for role in Role}
            prefill = now[Role.PREFILL] if prefill is None else prefill
            if prefill and (unfit := model.spec.no_prefill_workers) is not None:
                raise ConfigError(unfit, field="prefill")
            decode = now[Role.DECODE] if decode is None else decode
            actions = plan_change(
                members,
                prefill,
                decode,
                can_change_roles=model.spec.can_change_roles,
                name_prefix=self._workers.name_prefix(model),
                taken_ids=self._workers.slots.keys(),
            )
            self._workers.check_room(model, [each.role for each in actions if isinstance(each, StartWorker)])
            name = model.spec.served_name
            async with self._noted(ScaleRecord(model=name, prefill=prefill, decode=decode)):
                await self._carry_out(model, actions)
            return tuple(str(action) for action in actions)

    async def _carry_out(self, model: ResolvedModel, actions: Sequence[PoolChange]) -> None:
        for changed in (each for each in actions if isinstance(each, ChangeRole)):
            log.info("%s", changed)
            self._workers.change_role(changed.worker_id, changed.role)
        await self._start_all(model, [each for each in actions if isinstance(each, StartWorker)])
        for removed in (each for each in actions if isinstance(each, RemoveWorker)):
            log.info("%s", removed)
            await self.empty(self._workers.slots[removed.worker_id], move=True)
            await self._workers.remove(removed.worker_id)

    @asynccontextmanager
    async def _noted(self, change: ScaleRecord | DrainRecord) -> AsyncIterator[None]:
        if change not in self.under_way:  # else an earlier controller had begun it
            self.under_way.append(change)
        try:
            await self._note()
            yield
        finally:
            self._is_over(change)

    def _is_over(self, change: ScaleRecord | DrainRecord) -> None:
        if change in self.under_way:
            self.under_way.remove(change)
        self._workers.on_change()

    async def resume(self) -> None:
        """Continues what is under way since an earlier controller. A change that cannot be made any more is logged.
        Each stays in the record until it is over: this controller may die too."""
        for change in tuple(self.under_way):
            log.info("continuing a change of the controller before: %s", change)
            try:
                await self._continue(change)
            except TandemError as error:
                log.warning("%s could not be continued: %s", change, error.message)
            finally:
                self._is_over(change)

    async def _continue(self, change: ScaleRecord | DrainRecord) -> None:
        for attempt in range(1, RESUME_ATTEMPTS + 1):
            try:
                if isinstance(change, ScaleRecord):
                    await self.scale(change.model, change.prefill, change.decode)
                elif (slot := self._workers.slots.get(change.worker_id)) is not None and slot.epoch == change.epoch:
                    await self.drain(change.worker_id, restart=change.restart, move=change.move)
                return
            except TandemError:
                raise
            except Exception:  # as Ray's, which may be restarting
                what = f"{change} could not be continued (attempt {attempt} of {RESUME_ATTEMPTS})"
                count_failure("changes under way", what)
                if change not in self.under_way:
                    self.under_way.append(change)
                await asyncio.sleep(RESUME_DELAY_S)

    async def drain(self, worker_id: str, *, restart: bool, move: bool) -> None:
        """Empties a worker, then removes it, or restarts it and waits until it is ready.

        Raises ConfigError for an unknown worker, or for the last decode worker without `restart`.
        """
        async with self._lock:
            slot = self._workers.slots.get(worker_id)
            if slot is None:
                known = ", ".join(sorted(self._workers.slots))
                raise ConfigError(f"worker_id: expected one of {known}, got {worker_id!r}", field="worker_id")
            alone, epoch = self._is_alone(slot), slot.epoch
            if alone and not restart:
                raise ConfigError(f"worker_id: {worker_id} is the model's last decode worker", field="worker_id")
            async with self._noted(DrainRecord(worker_id=worker_id, epoch=epoch, restart=restart, move=move)):
                await self.empty(slot, move=move and not alone)
                await (self._restart(slot, epoch) if restart else self._workers.remove(worker_id))

    async def restart(self, worker_id: str, epoch: int, *, move: bool) -> bool:
        """Empties a worker in this epoch and restarts it; returns when it is ready in another one. False: it left the
        cluster. Raises TandemError if it cannot start."""
        async with self._lock:
            slot = self._workers.slots.get(worker_id)
            if slot is None:
                return False
            if slot.epoch == epoch:
                await self.empty(slot, move=move and not self._is_alone(slot))
            await self._restart(slot, epoch)
            return True

    def _is_alone(self, slot: WorkerSlot) -> bool:
        """Whether it is its model's only decode worker."""
        return [each for each in self._workers.slots_of(slot.model) if each.role is Role.DECODE] == [slot]

    async def _restart(self, slot: WorkerSlot, epoch: int) -> None:
        if slot.epoch == epoch:  # else it ended by itself
            slot.restart("restarted by request")
        await self._until_ready(slot, f"{slot.worker_id} to be ready again", after_epoch=epoch)
        await self._until_has_adapters(slot)

    async def _start_all(self, model: ResolvedModel, starts: Sequence[StartWorker]) -> None:
        """Starts workers in parallel. If some fail, the others stay, and the error lists every failure."""
        room = asyncio.Semaphore(MAX_PARALLEL_STARTS)

        self._workers.expect(model, {each.worker_id: each.role for each in starts})

        async def start(each: StartWorker) -> None:
            async with room:
                log.info("%s", each)
                await self._start(model, each)

        try:
            results = await asyncio.gather(*(start(each) for each in starts), return_exceptions=True)
        finally:
            self._workers.expect_no_more(each.worker_id for each in starts)
        failures = [each for each in results if each is not None]
        if not failures:
            return
        first = failures[0]
        if isinstance(first, TandemError):
            kept = ", ".join(each.worker_id for each, failure in zip(starts, results, strict=True) if failure is None)
            first.message = "; ".join(map(str, failures)) + (f" (started and kept: {kept})" if kept else "")
        raise first

    async def _start(self, model: ResolvedModel, start: StartWorker) -> None:
        slot = await self._workers.add(start.worker_id, start.role, model)
        try:
            await self._until_ready(slot, f"{start.worker_id} to be ready")
        except BaseException:  # cancelled too: a worker that never served is removed
            await self._workers.remove(start.worker_id)
            raise
        try:
            await self._until_has_adapters(slot)
        except UnavailableError as error:  # it serves all others
            log.warning("%s", error.message)

    async def empty(self, slot: WorkerSlot, *, move: bool) -> None:
        """Stops new requests to the worker and returns when it has none left, or is gone. Requests that remain after
        `control.drain_timeout_s` continue on other workers, as after the loss of a worker."""
        drain = cluster_pb2.DRAIN_MOVE if move else cluster_pb2.DRAIN_FINISH
        self._workers.set_drain(slot, drain)
        try:
            await self._until_empty(slot)
        except BaseException:  # the caller disconnected: the drain is cancelled
            self._workers.set_drain(slot, cluster_pb2.DRAIN_NONE)
            raise

    async def _until_empty(self, slot: WorkerSlot) -> None:
        # A router may have sent a request just before it received the change.
        await asyncio.sleep(2 * self._poll_s)
        deadline_s = asyncio.get_running_loop().time() + self._control.drain_timeout_s
        while await self._is_busy(slot):
            if asyncio.get_running_loop().time() > deadline_s:
                log.warning(
                    "%s was not empty in time: its remaining requests continue on other workers", slot.worker_id
                )
                return
            await asyncio.sleep(self._poll_s)

    async def _is_busy(self, slot: WorkerSlot) -> bool:
        state = await self._workers.state(slot)
        if state is None:  # a ready worker may be slow to answer; a lost one is no longer ready
            return slot.state is WorkerState.READY
        load = state.load
        requests = load.running_requests + load.waiting_requests + load.reserved_requests
        return bool(requests or load.blocks.leased or load.blocks.in_use)

    async def _until_ready(self, slot: WorkerSlot, what: str, after_epoch: int | None = None) -> None:
        timeout_s = self._control.start_timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while slot.epoch == after_epoch or slot.state is not WorkerState.READY:
            if slot.is_given_up:
                raise ConfigError(f"{slot.worker_id} cannot start: {slot.reason}")
            if asyncio.get_running_loop().time() > deadline_s:
                raise UnavailableError(f"control.start_timeout_s: waited {timeout_s:g} s for {what}")
            await asyncio.sleep(self._poll_s)

    async def _until_has_adapters(self, slot: WorkerSlot) -> None:
        """Those that its model serves. Raises UnavailableError if that takes too long: it retries."""
        timeout_s, why = self._control.start_timeout_s, ""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                adapters = self._workers.directory.adapters(slot.model.spec.served_name)
                if await has_loaded(self._workers, slot, adapters):
                    return
            except ConfigError as error:
                why = f": {error.message}"
            if asyncio.get_running_loop().time() > deadline_s:
                what = f"waited {timeout_s:g} s for {slot.worker_id} to load its model's adapters"
                raise UnavailableError(f"control.start_timeout_s: {what}{why}")
            await asyncio.sleep(self._poll_s)

    async def _member(self, slot: WorkerSlot) -> PoolMember:
        state = await self._workers.state(slot)
        load = None if state is None else state.load
        busy = 0 if load is None else load.running_requests + load.waiting_requests + load.reserved_requests
        return PoolMember(slot.worker_id, slot.role, busy, await self._workers.may_change_role(slot))
