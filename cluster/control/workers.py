"""The workers of a running cluster: their slots, the directory that others follow, and every change of either."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product

import grpc.aio

from cluster.backends.protocol import Backend, MemberHandle, Resources, Where
from cluster.control.directory import Directory
from cluster.control.record import WorkerRecord, WorkerState
from cluster.control.worker_slot import EpochSettings, Place, WorkerSlot
from cluster.spec.resolve import ResolvedCluster, ResolvedModel, check_memory_for
from cluster.tasks import raise_failure, run_together
from kvtransfer.control import REACHABLE, LinkState
from tandem.config.engine import EngineSpec
from tandem.config.model import Colocate, Role
from tandem.errors import ConfigError, TandemError, UnavailableError
from tandem.rpc.directory import WIRE_ROLE
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.rpc.grpc_tls import ChannelCache, ClusterTls
from tandem.rpc.identity import Identity
from tandem.rpc.versions import CONTROL_VERSIONS, Versions, common_version
from tandem.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

SHARED_CPUS = 8  # ranks that share one CPU in a local Ray cluster; in another, each rank reserves its own threads
STATE_TIMEOUT_S = 2.0


class Workers:
    """Adds, removes and watches workers. `start` comes first: until then there are none.

    `announce` receives one sentence for each change that a user may want to see. `on_change`: what `records` returns
    has changed.
    """

    def __init__(
        self,
        cluster: ResolvedCluster,
        backend: Backend,
        tls: ClusterTls | None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.slots: dict[str, WorkerSlot] = {}
        self.directory = Directory()
        self.announce: Callable[[str], None] = lambda text: None
        self._spec = cluster.spec
        self._models = cluster.models
        self._backend = backend
        self.on_change = on_change
        self._settings: EpochSettings | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}  # what stops removed workers
        self._expected: dict[str, tuple[ResolvedModel, Role]] = {}  # not placed yet
        self._channels = ChannelCache(tls, Identity.WORKER)

    @property
    def models(self) -> tuple[ResolvedModel, ...]:
        return self._models

    def model(self, name: str) -> ResolvedModel:
        """The model with this served name; an empty name means the only one. Raises ConfigError."""
        models = {model.spec.served_name: model for model in self._models}
        if not name and len(models) == 1:
            return next(iter(models.values()))
        if name not in models:
            raise ConfigError(f"model: expected one of {', '.join(models)}, got {name!r}", field="model")
        return models[name]

    def slots_of(self, model: ResolvedModel) -> list[WorkerSlot]:
        """The model's workers, without those that were given up."""
        return [slot for slot in self.slots.values() if slot.model is model and not slot.is_given_up]

    def roles(self, model: ResolvedModel) -> dict[str, Role]:
        """By worker, with those that are about to be added."""
        roles = {name: role for name, (of, role) in self._expected.items() if of is model}
        return roles | {slot.worker_id: slot.role for slot in self.slots_of(model)}

    def name_prefix(self, model: ResolvedModel) -> str:
        """What precedes the role and number in a worker id: empty if the cluster has one model."""
        return f"{model.spec.served_name.replace('/', '-')}-" if len(self._models) > 1 else ""

    # --- start and stop ----------------------------------------------------------------------------------------

    async def start(self, settings: EpochSettings) -> None:
        """Starts every worker of the spec. Raises ConfigError if one has no room."""
        self._settings = settings
        starts = []
        for model, role in product(self._models, Role):
            prefix = self.name_prefix(model)
            names = [f"{prefix}{role.value}-{number}" for number in range(model.spec.pool(role).workers)]
            self.expect(model, dict.fromkeys(names, role))
            starts += [(_order(model, role, number), self.add(name, role, model)) for number, name in enumerate(names)]
        await run_together(*(start for _, start in sorted(starts, key=lambda each: each[0])))

    def expect(self, model: ResolvedModel, roles: Mapping[str, Role]) -> None:
        """Tells of workers that are about to be added, so that those placed before leave room for them."""
        self._expected |= {worker_id: (model, role) for worker_id, role in roles.items()}

    def expect_no_more(self, worker_ids: Iterable[str]) -> None:
        """Those that were not added will not be."""
        for worker_id in worker_ids:
            self._expected.pop(worker_id, None)

    def set_log_level(self, level: str) -> None:
        """Of the epochs that start from now on."""
        if self._settings is not None:
            self._settings.log_level = level

    def resume(self, settings: EpochSettings, records: Sequence[WorkerRecord]) -> None:
        """Takes over the workers of an earlier controller. One that has no room restarts when it has."""
        self._settings = settings
        for each in records:
            if each.devices:
                self._backend.hold(each.worker_id, each.devices, self._resources(self.model(each.model), each.role))
        for each in records:
            model = self.model(each.model)
            self._add(each.worker_id, each.role, model, partial(self._place, each.worker_id, each.role, model), each)

    def records(self) -> tuple[WorkerRecord, ...]:
        return tuple(slot.record(self._backend.devices(name)) for name, slot in self.slots.items())

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._leaving.values(), return_exceptions=True)
        await self._channels.close()

    async def pending(self) -> str:
        """Names the workers or links that are not ready yet; empty if all are.

        Raises TandemError for what can never become ready, and any exception that ended a worker's task.
        """
        for slot in self.slots.values():
            if slot.state is WorkerState.FAILED:
                raise ConfigError(f"{slot.worker_id} cannot start: {slot.reason}")
        raise_failure(self._tasks.values())
        starting = [slot.worker_id for slot in self.slots.values() if slot.state is not WorkerState.READY]
        if starting:
            return f"workers {', '.join(starting)}"
        return await self._pending_links()

    async def _pending_links(self) -> str:
        for slot in self.slots.values():
            if slot.role is not Role.PREFILL:
                continue
            state = await self.state(slot)
            links = state.links if state is not None else []
            refused = [link for link in links if link.state == LinkState.REFUSED]
            if refused:
                raise ConfigError(f"{slot.worker_id} cannot reach {refused[0].peer_worker}: {refused[0].reason}")
            ready = {link.peer_worker for link in links if link.state in REACHABLE}
            peers = {s.worker_id for s in self.slots.values() if s.role is Role.DECODE and s.model is slot.model}
            if peers - ready or any(link.state not in REACHABLE for link in links):
                return f"links from {slot.worker_id}"
        return ""

    # --- changes -----------------------------------------------------------------------------------------------

    async def add(self, worker_id: str, role: Role, model: ResolvedModel) -> WorkerSlot:
        """Places the worker and starts its first epoch. Raises ConfigError if no host has room for it."""
        if (former := self._leaving.get(worker_id)) is not None:
            await asyncio.wait([former])
        self.expect(model, {worker_id: role})
        try:
            members = await self._place(worker_id, role, model)
        finally:
            self.expect_no_more([worker_id])

        async def placed() -> Sequence[MemberHandle]:
            return members

        return self._add(worker_id, role, model, placed)

    async def _place(self, worker_id: str, role: Role, model: ResolvedModel) -> Sequence[MemberHandle]:
        if (slot := self.slots.get(worker_id)) is not None:
            role = slot.role  # it may have changed since it was taken over
        return await self._backend.place(worker_id, self._ranks(model, role), self.where(model, role, worker_id))

    def where(self, model: ResolvedModel, role: Role, worker_id: str) -> Where:
        """Where the worker may be, now."""
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        roles = self.roles(model)
        return Where(
            node_groups=model.spec.pool(role).node_groups,
            colocate=model.spec.colocate if other in roles.values() else Colocate.NO,
            alike=tuple(name for name, known in roles.items() if known is role and name != worker_id),
            partners=tuple(name for name, known in roles.items() if known is other),
            partner=self._ranks(model, other),
        )

    def _ranks(self, model: ResolvedModel, role: Role) -> tuple[Resources, ...]:
        return (self._resources(model, role),) * model.spec.pool(role).tp

    async def may_change_role(self, slot: WorkerSlot) -> bool:
        """Whether the node where it is may have workers of both roles. Raises UnavailableError."""
        spec = slot.model.spec
        if not spec.can_change_roles or spec.prefill.node_groups == spec.decode.node_groups:
            return True
        try:
            return spec.roles_on(await self._backend.node_group(slot.worker_id)) == {*Role}
        except Exception as error:
            raise UnavailableError(f"cannot read on which node {slot.worker_id} is: {error}") from error

    def _add(
        self, worker_id: str, role: Role, model: ResolvedModel, place: Place, record: WorkerRecord | None = None
    ) -> WorkerSlot:
        if self._settings is None:
            raise ConfigError(f"{worker_id}: expected a started cluster: a worker can be added only after the start")
        slot = WorkerSlot(worker_id, role, model, place, self._settings, self._slot_changed, record)
        self.slots[worker_id] = slot
        if slot.info is not None:
            self.directory.put(self._listed(slot, slot.info))
        self.directory.put_place(_place(slot))
        self.on_change()
        self._tasks[worker_id] = asyncio.create_task(slot.run())
        return slot

    def _resources(self, model: ResolvedModel, role: Role) -> Resources:
        return _rank_resources(model.spec.engine_of(role), own_ray=self._spec.control.ray_address is None)

    def change_role(self, worker_id: str, role: Role) -> None:
        """Changes the role in the directory, which routers and workers follow. Processes keep running."""
        slot = self.slots[worker_id]
        slot.role = role
        self.directory.put_place(_place(slot))
        self.directory.change(worker_id, role=WIRE_ROLE[role])
        self.on_change()
        self.announce(f"{worker_id} is a {role.value} worker now")

    def set_drain(self, slot: WorkerSlot, drain: cluster_pb2.Drain.ValueType) -> None:
        slot.drain = drain
        self.directory.change(slot.worker_id, drain=drain)

    async def remove(self, worker_id: str) -> None:
        """Stops the worker's processes and releases its place, also if the caller is cancelled meanwhile."""
        self.directory.remove(worker_id)
        self.directory.remove_place(worker_id)
        del self.slots[worker_id]
        leaving = self._leaving[worker_id] = asyncio.create_task(self._release(worker_id, self._tasks.pop(worker_id)))
        await asyncio.shield(leaving)

    async def _release(self, worker_id: str, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await self._backend.release(worker_id)
            await self._channels.forget(worker_id)
        finally:
            del self._leaving[worker_id]
        self.on_change()
        self.announce(f"{worker_id} left the cluster")

    def register(self, info: cluster_pb2.WorkerInfo, versions: Versions = CONTROL_VERSIONS) -> None:
        """Makes a started worker ready. Raises TandemError if the epoch is not the one the controller started, or the
        worker is incompatible with the others or with this controller. `versions`: of the control protocol."""
        slot = self.slots.get(info.worker_id)
        if slot is None or not slot.accepts(info.epoch):
            raise ConfigError(
                f"worker_id: {info.worker_id} in epoch {info.epoch} is not a worker of this cluster", field="worker_id"
            )
        try:
            common_version(CONTROL_VERSIONS, versions, ("the controller", info.worker_id))
            self.directory.put(self._listed(slot, info))
        except TandemError as error:
            slot.refuse(error.message)
            raise
        slot.registered(info)
        self.on_change()

    @staticmethod
    def _listed(slot: WorkerSlot, info: cluster_pb2.WorkerInfo) -> cluster_pb2.WorkerInfo:
        """Role and drain may have changed since the epoch started."""
        info.role, info.drain = WIRE_ROLE[slot.role], slot.drain
        return info

    def _slot_changed(self, slot: WorkerSlot) -> None:
        if slot.state is WorkerState.READY:
            self.announce(f"{slot.worker_id} is ready{' again' if slot.restarts else ''}")
        else:
            self.directory.remove(slot.worker_id)
        self.directory.put_place(_place(slot))
        self.on_change()

    # --- state -------------------------------------------------------------------------------------------------

    async def state(self, slot: WorkerSlot) -> worker_pb2.WorkerState | None:
        """The state that the worker reports; None if it does not answer."""
        if slot.info is None:
            return None
        channel = await self._channels.get(slot.worker_id, slot.info.address)
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        try:
            return await stub.GetState(worker_pb2.GetStateRequest(), timeout=STATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("%s does not answer: %s", slot.worker_id, error_from_rpc(error).message)
            return None

    def check_room(self, model: ResolvedModel, roles: Sequence[Role]) -> None:
        """Raises ConfigError or InsufficientMemory if the devices cannot hold these additional workers."""
        if self._spec.control.ray_address is None:
            check_memory_for(model, roles)


def _place(slot: WorkerSlot) -> cluster_pb2.WorkerPlace:
    return cluster_pb2.WorkerPlace(
        worker_id=slot.worker_id,
        model=slot.model.spec.served_name,
        role=WIRE_ROLE[slot.role],
        ranks=slot.pool.tp,
        restarts=slot.restarts,
    )


def _order(model: ResolvedModel, role: Role, number: int) -> tuple[float, float]:
    """Sort key of a worker: large shares of a GPU are placed first, as `resolve_devices` checks them. Among equals the
    roles alternate in proportion, so that nodes that join one after another get workers of both."""
    engine = model.spec.engine_of(role)
    share = engine.device_share if engine.on_gpu else 0.0
    return -share, number / model.spec.pool(role).workers


def _rank_resources(engine: EngineSpec, *, own_ray: bool) -> Resources:
    cpus = engine.threads_per_rank / (SHARED_CPUS if own_ray else 1)
    return Resources(cpus, engine.device_share if engine.on_gpu else 0.0, engine.device)
