"""The controller: makes the cluster what the spec says, and keeps it so. It serves no request; the data path goes on
without it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from cluster.backends import embedded_redis
from cluster.backends.protocol import Backend, Resources, RunningProcess
from cluster.backends.subprocess_backend import LocalMember
from cluster.control.admin_service import ALLOWED, AdminService
from cluster.control.apply import Apply
from cluster.control.autoscaling import Autoscaling
from cluster.control.directory import Directory
from cluster.control.node_drainer import Leaving
from cluster.control.pool_scaler import ROLES, LiveRatio
from cluster.control.router_slot import RouterSlot, RouterState, router_specs
from cluster.control.router_traces import RouterTraces
from cluster.control.worker_slot import LifeSettings, WorkerSlot, WorkerState
from cluster.spec.changes import SpecSource
from cluster.spec.redis_probe import check_redis
from cluster.spec.resolve import ResolvedCluster, ResolvedModel, check_memory_for, free_ports
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.spec import ClusterSpec, Role
from tandem.errors import ConfigError, PortInUse, TandemError, UnavailableError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.rpc.grpc_tls import ChannelCache, ClusterTls, add_port, make_server
from tandem.rpc.identity import Identity
from tandem.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

POLL_S = 0.2
SHARED_CPUS = 8  # ranks of CPU threads that may share one on this machine; elsewhere each asks for its own
STATE_TIMEOUT_S = 2.0
REDIS_TIMEOUT_S = 1.0


class Controller:
    """Args: `run_base` holds every private run folder of this cluster and is removed at the end; `log_dir` stays."""

    def __init__(
        self,
        cluster: ResolvedCluster,
        backend: Backend,
        run_base: Path,
        log_dir: Path,
        source: SpecSource | None = None,
    ) -> None:
        self.spec = cluster.spec
        self.directory = Directory()
        self.live_ratio = LiveRatio(self)
        self.autoscaling = Autoscaling(self, self.spec)
        self.apply = Apply(self, source or SpecSource(self.spec, {}))
        self.slots: dict[str, WorkerSlot] = {}
        self.routers: list[RouterSlot] = []
        self.backend = backend
        self.stop_requested = asyncio.Event()
        self.announce: Callable[[str], None] = lambda what: None  # told, in words, what becomes of workers
        self._cluster = cluster
        self._run_base = run_base
        self.log_dir = log_dir
        self._admin: grpc.aio.Server | None = None
        self._admin_address = ""
        self._tls = ClusterTls.maybe(self.spec.name, Identity.CONTROLLER, self.spec.security.tls)
        self._router_secret = secrets.token_hex(16)
        self._salt_secret = secrets.token_hex(32)
        self._redis = LocalMember("redis", log_dir)
        self._redis_url = self.spec.redis.url
        self._tasks: list[asyncio.Task[None]] = []
        self._lives: dict[str, asyncio.Task[None]] = {}  # of workers
        self._autoscaler: asyncio.Task[None] | None = None
        self._settings: LifeSettings | None = None
        self._worker_channels = ChannelCache(self._tls, Identity.WORKER)

    @property
    def models(self) -> tuple[ResolvedModel, ...]:
        return self._cluster.models

    @property
    def http_address(self) -> str:
        """Of the first router."""
        return f"{self.spec.router.http_host}:{self.spec.router.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.spec.router.grpc_host}:{self.spec.router.grpc_port}"

    @property
    def traces(self) -> RouterTraces:
        return RouterTraces({router.name: router.control_address for router in self.routers}, self._router_secret)

    @property
    def admin_address(self) -> str:
        return self._admin_address

    # --- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts everything; `wait_ready` tells when it serves. Raises TandemError when it cannot even begin."""
        self._run_base.mkdir(mode=0o700, parents=True)
        await self._serve_admin()
        await self._start_redis()
        self._settings = LifeSettings(self.spec, self._admin_address, self._redis_url, self._run_base)
        await self.backend.open()
        await together(self._start_routers(), self._start_workers())
        self._tasks.append(asyncio.create_task(Leaving(self).run()))
        await self.start_autoscaling(self.spec)

    async def wait_ready(self, progress: Callable[[str], None]) -> None:
        """Until every worker is registered, every link stands and every router serves.

        Raises:
            TandemError: something can never become ready; says what and why.
        """
        deadline_s = asyncio.get_running_loop().time() + self.spec.control.start_timeout_s
        told = ""
        while waiting := await self._waiting_for():
            if waiting != told:
                progress(f"waiting for {waiting}")
                told = waiting
            if asyncio.get_running_loop().time() > deadline_s:
                raise UnavailableError(
                    f"control.start_timeout_s: not ready within {self.spec.control.start_timeout_s:g} s, still "
                    f"waiting for {waiting}; the logs are in {self.log_dir}"
                )
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Ends everything that was started, in whatever state it is."""
        # First: they let running requests end, or tell their clients, while workers live.
        await asyncio.gather(*(router.close() for router in self.routers))
        running = [*self._tasks, *self._lives.values(), *([self._autoscaler] if self._autoscaler else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._redis.stop()
        await self._worker_channels.close()
        if self._admin is not None:
            await self._admin.stop(grace=0.2)
        await self.backend.close()
        shutil.rmtree(self._run_base, ignore_errors=True)

    async def _waiting_for(self) -> str:
        """What is not ready yet, in words; empty when all is."""
        for slot in self.slots.values():
            if slot.state is WorkerState.FAILED:
                raise ConfigError(f"{slot.worker_id} cannot start: {slot.reason}")
        for task in (*self._tasks, *self._lives.values()):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error  # a fault of ours: better told than waited out
        starting = [slot.worker_id for slot in self.slots.values() if slot.state is not WorkerState.READY]
        if starting:
            return f"workers {', '.join(starting)}"
        if links := await self._links_waited_for():
            return links
        return await self._routers_waited_for()

    async def _routers_waited_for(self) -> str:
        routers = await asyncio.gather(*(router.status() for router in self.routers))
        if failure := next((router.failure for router in self.routers if router.failure), ""):
            raise ConfigError(failure)
        return ", ".join(router.name for router in routers if router.state is not RouterState.READY)

    async def _links_waited_for(self) -> str:
        for slot in self.slots.values():
            if slot.role is not Role.PREFILL:
                continue
            state = await self.worker_state(slot)
            links = state.links if state is not None else []
            refused = [link for link in links if link.state == "refused"]
            if refused:
                raise ConfigError(f"{slot.worker_id} cannot reach {refused[0].peer_worker}: {refused[0].reason}")
            ready = {link.peer_worker for link in links if link.state == "ready"}
            peers = {s.worker_id for s in self.slots.values() if s.role is Role.DECODE and s.model is slot.model}
            if peers - ready or any(link.state != "ready" for link in links):
                return f"links from {slot.worker_id}"
        return ""

    # --- parts -------------------------------------------------------------------------------------------------

    async def _serve_admin(self) -> None:
        control = self.spec.control
        self._admin = make_server(self._tls, ALLOWED, SERVER_OPTIONS)
        AdminService(self).add_to(self._admin)
        try:
            port = add_port(self._admin, f"{control.admin_host}:{control.admin_port}", self._tls)
        except RuntimeError:  # all that gRPC tells; the port was free a moment ago
            raise PortInUse(
                f"control.admin_port: cannot listen on {control.admin_host}:{control.admin_port}: choose another with "
                "--admin-port",
                field="control.admin_port",
            ) from None
        await self._admin.start()
        self._admin_address = f"{control.admin_host}:{port}"

    async def _start_redis(self) -> None:
        if self.spec.redis.mode != "embedded":
            return
        start, self._redis_url = embedded_redis.member(self._run_base / "redis")
        await self._redis.start(start)

    async def _start_routers(self) -> None:
        for number, router in enumerate(router_specs(self.spec)):
            router_id = f"router-{number}"
            run_dir = self._run_base / router_id
            launch = RouterLaunch(
                cluster=self.spec.name,
                router_id=router_id,
                router=router,
                models=tuple(_served(model) for model in self._cluster.models),
                controller_address=self._admin_address,
                redis_url=self._redis_url,
                controller_secret=self._router_secret,
                observability=self.spec.observability,
                controller_socket=str(run_dir / "controller.sock"),
                tls=self.spec.security.tls,
                auth=self.spec.security.auth,
                salt_secret=self._salt_secret,
                log_level=self.spec.log_level,
            )
            member = await self.backend.place_here(launch.router_id)
            slot = RouterSlot(launch, member, run_dir)
            self.routers.append(slot)
            self._tasks.append(asyncio.create_task(slot.run()))

    def name_prefix(self, model: ResolvedModel) -> str:
        """Before a worker's role and number, where there are several models."""
        return f"{model.spec.served_name.replace('/', '-')}-" if len(self._cluster.models) > 1 else ""

    async def start_autoscaling(self, spec: ClusterSpec) -> None:
        """By what `spec` says of it and of the models' pools, instead of what it was told before."""
        if self._autoscaler is not None:
            self._autoscaler.cancel()
            await asyncio.gather(self._autoscaler, return_exceptions=True)
            self._autoscaler = None
        self.autoscaling = Autoscaling(self, spec)
        if spec.autoscaler.enabled:
            self._autoscaler = asyncio.create_task(self.autoscaling.run())

    async def _start_workers(self) -> None:
        starts = []
        for model in self._cluster.models:
            prefix = self.name_prefix(model)
            for role, pool in ((Role.PREFILL, model.spec.prefill), (Role.DECODE, model.spec.decode)):
                names = [f"{prefix}{role.value}-{number}" for number in range(pool.workers)]
                starts += [self.add_worker(name, role, model) for name in names]
        await together(*starts)

    async def add_worker(self, worker_id: str, role: Role, model: ResolvedModel) -> WorkerSlot:
        """Places it and begins its first life. Raises ConfigError when there is no room for it."""
        if self._settings is None:
            raise ConfigError("workers are added to a cluster that was started")
        pool = model.spec.prefill if role is Role.PREFILL else model.spec.decode
        resources = _rank_resources(model, own_ray=self.spec.control.ray_address is None)
        members = await self.backend.place(worker_id, [resources] * pool.tp)
        slot = WorkerSlot(worker_id, role, model, members, self._settings, self._slot_changed)
        self.slots[worker_id] = slot
        self.directory.put_place(_place(slot))
        self._lives[worker_id] = asyncio.create_task(slot.run())
        return slot

    def change_role(self, worker_id: str, role: Role) -> None:
        """Routers and workers hear of it by the directory; the worker's processes are not touched."""
        slot = self.slots[worker_id]
        slot.role = role
        self.directory.put_place(_place(slot))
        self.directory.change(worker_id, role=ROLES[role])
        self.announce(f"{worker_id} is a {role.value} worker now")

    async def remove_worker(self, worker_id: str) -> None:
        """Ends its life and gives back its place."""
        self.directory.remove(worker_id)
        self.directory.remove_place(worker_id)
        del self.slots[worker_id]
        life = self._lives.pop(worker_id)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await self.backend.give_back(worker_id)
        await self._worker_channels.forget(worker_id)
        self.announce(f"{worker_id} left the cluster")

    async def check_room(self, model: ResolvedModel, roles: Sequence[Role]) -> None:
        """Raises ConfigError or InsufficientMemory when the devices cannot hold so many workers more."""
        if model.spec.engine.device == "cpu" and self.spec.control.ray_address is None:
            check_memory_for(model, roles)

    def _slot_changed(self, slot: WorkerSlot) -> None:
        if slot.state is WorkerState.READY:
            self.announce(f"{slot.worker_id} is ready{' again' if slot.restarts else ''}")
        else:
            self.directory.remove(slot.worker_id)
        self.directory.put_place(_place(slot))

    # --- what the admin service asks ---------------------------------------------------------------------------

    def register(self, info: cluster_pb2.WorkerInfo) -> None:
        """Raises TandemError when it is not the life the controller started, or cannot work with the others."""
        slot = self.slots.get(info.worker_id)
        if slot is None or not slot.accepts(info.epoch):
            raise ConfigError(
                f"worker_id: {info.worker_id} in epoch {info.epoch} is not a worker of this cluster", field="worker_id"
            )
        info.role, info.drain = ROLES[slot.role], slot.drain  # which may have changed since it was started
        try:
            self.directory.put(info)
        except TandemError as error:
            slot.refuse(error.message)
            raise
        slot.registered(info)

    async def worker_state(self, slot: WorkerSlot) -> worker_pb2.WorkerState | None:
        """What a worker says of itself, or None when it does not answer."""
        if slot.info is None:
            return None
        channel = await self._worker_channels.get(slot.worker_id, slot.info.address)
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        try:
            return await stub.GetState(worker_pb2.GetStateRequest(), timeout=STATE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("%s does not answer: %s", slot.worker_id, error_from_rpc(error).message)
            return None

    async def own_processes(self) -> list[RunningProcess]:
        found = await asyncio.gather(self._redis.processes(), *(router.processes() for router in self.routers))
        return [process for owner in found for process in owner]

    async def redis_state(self) -> str:
        """Its mode, or `unreachable`."""
        if self._redis_url is None:
            return self.spec.redis.mode
        try:
            await asyncio.to_thread(check_redis, self._redis_url, REDIS_TIMEOUT_S)
        except ConfigError:
            return "unreachable"
        return self.spec.redis.mode


async def together(*parts: Coroutine[Any, Any, object]) -> None:
    """Runs all; when one fails the others are ended first and its error is the one raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _served(model: ResolvedModel) -> ServedModel:
    return ServedModel(
        name=model.spec.served_name,
        model_dir=str(model.folder),
        model_fingerprint=model.fingerprint,
        block_tokens=model.spec.engine.block_tokens,
        max_model_tokens=model.max_model_tokens,
    )


def _place(slot: WorkerSlot) -> cluster_pb2.WorkerPlace:
    pool = slot.model.spec.prefill if slot.role is Role.PREFILL else slot.model.spec.decode
    return cluster_pb2.WorkerPlace(
        worker_id=slot.worker_id,
        model=slot.model.spec.served_name,
        role=ROLES[slot.role],
        ranks=pool.tp,
        restarts=slot.restarts,
    )


def _rank_resources(model: ResolvedModel, *, own_ray: bool) -> Resources:
    engine = model.spec.engine
    cpus = engine.threads_per_rank / (SHARED_CPUS if own_ray else 1)
    return Resources(cpus=cpus, gpus=1.0 if engine.device.startswith("cuda") else 0.0)


def needed_cpus(cluster: ResolvedCluster) -> float:
    """What a Ray cluster of our own offers. It starts a process of its own for each CPU, so no more than what the
    workers of the spec use; later ones find room because each rank asks for a part only (`_rank_resources`)."""
    return sum(
        pool.workers * pool.tp * model.spec.engine.threads_per_rank for model in cluster.models for pool in model.pools
    )


def with_free_ports(cluster: ResolvedCluster) -> ResolvedCluster:
    """Ports given as 0 become free ones, so that everybody can be told the same."""
    spec = cluster.spec
    http_port, grpc_port = free_ports(spec.router.http_host, spec.router.grpc_host)
    router = spec.router.model_copy(
        update={"http_port": spec.router.http_port or http_port, "grpc_port": spec.router.grpc_port or grpc_port}
    )
    return ResolvedCluster(spec.model_copy(update={"router": router}), cluster.models)
