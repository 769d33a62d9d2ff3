"""The routers of a running cluster: those that it starts together, watches, and closes before the workers, and those
that join it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.backends.protocol import Backend
from cluster.control.joined_routers import JoinedRouters, model_files
from cluster.control.record import RouterRecord, RouterSecrets
from cluster.control.router_slot import RouterSlot, RouterState, RouterStatus, router_specs
from cluster.control.router_traces import RouterTraces
from cluster.keeper.members import RunningProcess
from cluster.spec.resolve import ResolvedCluster, ResolvedModel
from cluster.tasks import raise_failure
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.router import RouterSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, ModelNotFound, UnavailableError
from tandem.rpc.grpc_tls import ClusterTls
from tandem.v1 import cluster_pb2, trace_pb2

log = logging.getLogger(__name__)

PLACE = ("replicas", "http_host", "http_port", "grpc_host", "grpc_port")
NOWHERE = {name: getattr(RouterSpec(), name) for name in PLACE}
KEPT = (*PLACE, "tls")  # by a router whose settings change


class Routers:
    """`slots`: those that it starts. The addresses shown to users are those of the first router."""

    def __init__(
        self,
        cluster: ResolvedCluster,
        backend: Backend,
        tls: ClusterTls | None,
        run_base: Path,
        on_change: Callable[[], None],
        note: Callable[[], Awaitable[None]],
    ) -> None:
        """`note` writes the record, `on_change` asks for it."""
        self.slots: list[RouterSlot] = []
        self.joined = JoinedRouters(cluster.spec.name, tls, self._joined_launch, self._note_joined)
        self._before: ClusterSpec | None = None  # the spec before the change of settings that is under way
        self._rejoining: tuple[str, ...] = ()  # routers that had joined the controller before this one
        self._cluster = cluster
        self._spec = cluster.spec  # as it was changed, where that concerns routers
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._updating: asyncio.Task[None] | None = None  # of routers that joined with other settings
        self._backend = backend
        self._run_base = run_base
        self._on_change = on_change
        self._note = note
        self._tls = tls
        self.secrets = RouterSecrets(controller=secrets.token_hex(16), salt=secrets.token_hex(32))
        self._controller_address = ""
        self._redis_url: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """HTTP and gRPC of every router."""
        return [(slot.http_address, slot.grpc_address) for slot in self.slots] + self.joined.addresses

    @property
    def traces(self) -> RouterTraces:
        own = {router.name: router.control_address for router in self.slots}
        return RouterTraces({**self.joined.control_addresses, **own}, self.secrets.controller, self._tls)

    def configure(self, controller_address: str, redis_url: str | None) -> None:
        """What routers are told. Call it before one can join."""
        self._controller_address, self._redis_url = controller_address, redis_url

    async def start(self) -> None:
        """Starts every router of the spec. Raises PortInUse if too few ports are free."""
        launches = [
            self._own_launch(f"router-{number}", router) for number, router in enumerate(router_specs(self._spec))
        ]
        await self._add(RouterRecord(launch=launch, restarts=0, has_served=False) for launch in launches)

    async def resume(self, records: Sequence[RouterRecord]) -> None:
        """Takes over the routers of an earlier controller, with the settings that they have."""
        await self._add(records)

    @property
    def settings(self) -> RouterSpec:
        return self._spec.router

    def before(self, spec: ClusterSpec) -> ClusterSpec | None:
        """The spec whose settings some router may still have, while they change to those of `spec`; else None."""
        if self._before is not None:
            return self._before
        return self._spec if self._spec.of_routers != spec.of_routers else None

    def take_settings(self, spec: ClusterSpec, joined: tuple[str, ...]) -> None:
        """Those that the routers of an earlier controller have, until `change`. `joined`: those that had joined it."""
        self._spec = self._before = spec
        self._rejoining = joined

    async def change(self, spec: ClusterSpec) -> None:
        """Returns when every router has the settings of `spec`. Goes on if the caller is cancelled, and the next
        controller does if this one dies.

        Raises UnavailableError if one does not serve with them: then all have their earlier ones again.
        """
        await asyncio.shield(self._start(self._change(spec)))

    def _start(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return task

    async def _change(self, spec: ClusterSpec) -> None:
        async with self._changing:
            before = self._before = self._spec
            self._spec = spec
            try:
                await self._note()
                if spec != before:
                    await self.joined.wait_for(self._rejoining)
                await self._settle()
            except Exception as error:  # also the backend's, if it cannot note the change
                log.warning("the routers get their earlier settings again: %s", error)
                self._spec = before
                try:
                    await self._settle()
                except UnavailableError as second:
                    log.warning("nor does one serve with those: %s", second.message)
                raise
            finally:
                self._before, self._rejoining = None, ()
                self._note_joined()

    def _note_joined(self) -> None:
        self._on_change()
        is_changing = self._before is not None or not (self._updating is None or self._updating.done())
        if self._is_closing or is_changing or not self.joined.has_outdated:
            return
        self._updating = self._start(self._update_joined())  # of a router that was away while settings changed

    async def _update_joined(self) -> None:
        async with self._changing:
            try:
                await self.joined.settle(self._spec.control.start_timeout_s)
            except UnavailableError as error:
                log.warning("a router that joined with other settings keeps them: %s", error.message)

    async def _settle(self) -> None:
        """Restarts routers that have other settings, one after another: the others serve meanwhile, and running
        requests may end within the drain timeout.

        Raises UnavailableError if one does not serve again; those after it keep their settings.
        """
        timeout_s = self._spec.control.start_timeout_s
        for slot in self.slots:
            wanted = self._settled(slot.launch)
            if wanted != slot.launch:
                log.info("restarting with other settings", extra={"router": slot.name})
                await slot.change(wanted, timeout_s)
        await self.joined.settle(timeout_s)

    def _settled(self, launch: RouterLaunch) -> RouterLaunch:
        """Hosts, ports and certificates stay."""
        kept = {name: getattr(launch.router, name) for name in KEPT}
        router = self._spec.router.model_copy(update=kept)
        return launch.model_copy(update={"router": router, "log_level": self._spec.log_level_of("router")})

    def records(self) -> tuple[RouterRecord, ...]:
        return tuple(slot.record() for slot in self.slots)

    async def _add(self, records: Iterable[RouterRecord]) -> None:
        for record in records:
            name = record.launch.router_id
            member = await self._backend.place_local(name)
            slot = RouterSlot(record, member, self._run_base / name, self._on_change)
            self.slots.append(slot)
            self._tasks.append(asyncio.create_task(slot.run()))

    def _launch(self, router_id: str, router: RouterSpec, spec: ClusterSpec) -> RouterLaunch:
        return RouterLaunch(
            cluster=spec.name,
            router_id=router_id,
            router=router,
            models=tuple(_served(model) for model in self._cluster.models),
            controller_address=self._controller_address,
            redis_url=self._redis_url,
            controller_secret=self.secrets.controller,
            observability=spec.observability,
            tls=spec.security.tls,
            auth=spec.security.auth,
            salt_secret=self.secrets.salt,
            log_level=spec.log_level_of("router"),
        )

    def _joined_launch(self, router_id: str, is_its_turn: bool) -> RouterLaunch:
        """Where it listens is its own to say."""
        spec = self._spec if self._before is None or is_its_turn else self._before
        return self._launch(router_id, spec.router.model_copy(update=NOWHERE), spec)

    def _own_launch(self, router_id: str, router: RouterSpec) -> RouterLaunch:
        return self._launch(router_id, router, self._spec).model_copy(
            update={
                "controller_socket": str(self._run_base / router_id / "controller.sock"),
                "drains_as_orphan": self._cluster.spec.control.ray_address is not None,
            }
        )

    def model_files(self, name: str) -> Iterator[cluster_pb2.ModelFilePart]:
        """Raises ModelNotFound."""
        folder = next((model.folder for model in self._cluster.models if model.spec.served_name == name), None)
        if folder is None:
            raise ModelNotFound(f"model: this cluster serves no model {name!r}", field="model")
        return model_files(folder)

    async def status(self) -> list[RouterStatus]:
        own = await asyncio.gather(*(router.status() for router in self.slots))
        return [*own, *await self.joined.status()]

    async def processes(self) -> list[RunningProcess]:
        found = await asyncio.gather(*(router.processes() for router in self.slots))
        return [process for owner in found for process in owner]

    async def demands(self) -> dict[str, trace_pb2.RouterDemand]:
        """Demand by router, for the routers that answered."""
        return await self.traces.demands()

    async def pending(self) -> str:
        """Names the routers that are not ready yet; empty if all are. Raises ConfigError if one cannot start."""
        raise_failure(self._tasks)
        routers = await asyncio.gather(*(router.status() for router in self.slots))  # joined ones come and go
        if failure := next((router.failure for router in self.slots if router.failure), ""):
            raise ConfigError(failure)
        return ", ".join(router.name for router in routers if router.state is not RouterState.READY)

    async def restart(self, name: str, restarts: int) -> None:
        """Restarts the router, unless it has been since `restarts`, and returns when it serves. Its running requests
        may finish within its drain timeout. Raises UnavailableError."""
        slot = next(each for each in self.slots if each.name == name)
        await slot.restart(restarts, self._cluster.spec.control.start_timeout_s)

    async def close(self) -> None:
        """Lets running requests finish within `router.drain_timeout_s`, then stops the routers."""
        self._is_closing = True
        changes = list(self._changes)
        for change in changes:
            change.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        await asyncio.gather(*(router.close() for router in self.slots))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _served(model: ResolvedModel) -> ServedModel:
    return ServedModel(
        name=model.spec.served_name,
        model_dir=str(model.folder),
        model_fingerprint=model.fingerprint,
        block_tokens=model.spec.engine_of(Role.DECODE).block_tokens,
        max_model_tokens=model.max_model_tokens,
        tool_parser=model.spec.tool_parser,
        reasoning_parser=model.spec.reasoning_parser,
        sampling_defaults=model.spec.sampling_defaults,
        special_tokens_in_messages=model.spec.special_tokens_in_messages,
    )
