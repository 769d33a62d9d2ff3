"""The routers of a running cluster: started together, watched, closed before the workers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cluster.backends.protocol import Backend
from cluster.control.record import RouterRecord
from cluster.control.router_slot import RouterSlot, RouterState, RouterStatus, router_specs
from cluster.control.router_traces import RouterTraces
from cluster.keeper.members import RunningProcess
from cluster.spec.resolve import ResolvedCluster, ResolvedModel
from cluster.tasks import raise_failure
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.spec import Role, RouterSpec
from tandem.errors import ConfigError
from tandem.v1 import trace_pb2


class Routers:
    """The addresses shown to users are those of the first router."""

    def __init__(
        self, cluster: ResolvedCluster, backend: Backend, run_base: Path, on_change: Callable[[], None]
    ) -> None:
        self.slots: list[RouterSlot] = []
        self._cluster = cluster
        self._backend = backend
        self._run_base = run_base
        self._on_change = on_change
        self._controller_secret = secrets.token_hex(16)
        self._salt_secret = secrets.token_hex(32)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def http_address(self) -> str:
        if self.slots:  # those that were taken over may have another port than this controller's spec
            return self.slots[0].http_address
        router = self._cluster.spec.router
        return f"{router.http_host}:{router.http_port}"

    @property
    def grpc_address(self) -> str:
        if self.slots:
            return self.slots[0].grpc_address
        router = self._cluster.spec.router
        return f"{router.grpc_host}:{router.grpc_port}"

    @property
    def traces(self) -> RouterTraces:
        return RouterTraces({router.name: router.control_address for router in self.slots}, self._controller_secret)

    async def start(self, controller_address: str, redis_url: str | None) -> None:
        """Starts every router of the spec. Raises PortInUse if too few ports are free."""
        launches = [
            self._launch(number, router, controller_address, redis_url)
            for number, router in enumerate(router_specs(self._cluster.spec))
        ]
        await self._add(RouterRecord(launch=launch, restarts=0, has_served=False) for launch in launches)

    async def resume(self, records: Sequence[RouterRecord]) -> None:
        """Takes over the routers of an earlier controller."""
        for record in records:
            self._controller_secret = record.launch.controller_secret or self._controller_secret
            self._salt_secret = record.launch.salt_secret or self._salt_secret
        await self._add(records)

    def records(self) -> tuple[RouterRecord, ...]:
        return tuple(slot.record() for slot in self.slots)

    async def _add(self, records: Iterable[RouterRecord]) -> None:
        for record in records:
            name = record.launch.router_id
            member = await self._backend.place_local(name)
            slot = RouterSlot(record, member, self._run_base / name, self._on_change)
            self.slots.append(slot)
            self._tasks.append(asyncio.create_task(slot.run()))

    def _launch(self, number: int, router: RouterSpec, controller_address: str, redis_url: str | None) -> RouterLaunch:
        spec = self._cluster.spec
        router_id = f"router-{number}"
        return RouterLaunch(
            cluster=spec.name,
            router_id=router_id,
            router=router,
            models=tuple(_served(model) for model in self._cluster.models),
            controller_address=controller_address,
            redis_url=redis_url,
            controller_secret=self._controller_secret,
            observability=spec.observability,
            controller_socket=str(self._run_base / router_id / "controller.sock"),
            tls=spec.security.tls,
            auth=spec.security.auth,
            salt_secret=self._salt_secret,
            log_level=spec.log_level,
            drains_as_orphan=spec.control.ray_address is not None,
        )

    async def status(self) -> list[RouterStatus]:
        return await asyncio.gather(*(router.status() for router in self.slots))

    async def processes(self) -> list[RunningProcess]:
        found = await asyncio.gather(*(router.processes() for router in self.slots))
        return [process for owner in found for process in owner]

    async def demands(self) -> dict[str, trace_pb2.RouterDemand]:
        """Demand by router, for the routers that answered."""
        return await self.traces.demands()

    async def pending(self) -> str:
        """Names the routers that are not ready yet; empty if all are. Raises ConfigError if one cannot start."""
        raise_failure(self._tasks)
        routers = await self.status()
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
