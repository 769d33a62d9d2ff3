"""Members in Ray actors, one per tensor-parallel rank. The only module that imports Ray.

An actor hosts a `Supervisor`; the processes it starts die with it. Ray restarts a lost actor (`max_restarts`); the
controller, told by `wait_end`, then starts the whole worker again under a new epoch. Ray carries control only: actor
calls take about a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by Ray when it is imported and by the processes it starts.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray._private.node import Node
from ray.exceptions import RayActorError, RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.backends.protocol import MemberHandle, MemberStart, Resources, RunningProcess
from cluster.backends.supervisor import Supervisor
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20  # Ray's least; nothing of ours goes through it
RETRY_S = 0.2
ASK_TIMEOUT_S = 2.0
SYSTEM_CONFIG = {
    "worker_niceness": 0,  # else 15, which ranks inherit: whatever else runs here would go before them
    # A frozen node is noticed in about 5 s instead of 65.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def leave_out_helpers() -> None:
    """A Ray of our own starts without its log monitor, autoscaler and API server: nothing here asks them, each takes a
    second of a core and 80 MB, and no option of `ray.init` leaves them out. A Ray that names them otherwise has them.
    """
    for name in ("start_log_monitor", "start_monitor", "start_api_server"):
        if hasattr(Node, name):
            setattr(Node, name, _start_nothing)


def _start_nothing(node: Node, **settings: object) -> None:
    """In place of a method that starts a process."""


class SupervisorActor:
    """The actor's body. Messages are JSON, so no class of ours has to be alike on both sides."""

    def __init__(self, name: str, log_dir: str) -> None:
        self._supervisor = Supervisor(name, Path(log_dir))

    async def start(self, start: str) -> None:
        await self._supervisor.start(MemberStart.model_validate_json(start))

    async def wait_end(self) -> str:
        return await self._supervisor.wait_end()

    async def processes(self) -> list[tuple[str, int]]:
        return [(process.name, process.pid) for process in self._supervisor.processes()]

    async def stop(self) -> None:
        await self._supervisor.stop()


class RayMember:
    """Of an actor that may still wait for its place, only `start` is asked: Ray lets calls wait too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: Any = None
        self._started = False

    def live_in(self, actor: Any) -> None:
        """From now on; what there was before is gone."""
        self._actor, self._started = actor, False

    async def start(self, start: MemberStart) -> None:
        while True:
            try:
                await self._actor.start.remote(start.model_dump_json())
                self._started = True
                return
            except RayActorError:
                await asyncio.sleep(RETRY_S)  # Ray is bringing the actor back

    async def wait_end(self) -> str:
        try:
            end: str = await self._actor.wait_end.remote()
            return end
        except RayActorError:
            return f"the Ray actor of {self.name} was lost"

    async def processes(self) -> tuple[RunningProcess, ...]:
        if not self._started:
            return ()
        try:
            return tuple(RunningProcess(name=name, pid=pid) for name, pid in await self._actor.processes.remote())
        except RayActorError:
            return ()

    async def stop(self) -> None:
        if not self._started:
            return
        try:
            await self._actor.stop.remote()
        except RayActorError:
            pass  # its processes died with it

    def kill(self) -> None:
        """The actor, and its processes with it."""
        ray.kill(self._actor, no_restart=True)


@dataclass(slots=True)
class _Place:
    """Of one group: what it needs, what Ray keeps for it, and who lives there."""

    resources: tuple[Resources, ...]
    reserved: PlacementGroup
    members: list[RayMember]

    def give_back(self) -> None:
        for member in self.members:
            member.kill()
        remove_placement_group(self.reserved)


class RayBackend:
    """Args: `address` of an existing cluster, or None to start one on this machine, in `temp_dir`, with `cpus`.

    Nodes of an existing cluster may still be on their way: a place is waited for, for `place_timeout_s`.
    """

    name = "ray"

    def __init__(
        self, log_dir: Path, temp_dir: Path, *, address: str | None, cpus: float, place_timeout_s: float
    ) -> None:
        self._log_dir = log_dir
        self._temp_dir = temp_dir
        self._address = address
        self._cpus = cpus
        self._place_timeout_s = place_timeout_s
        self._here: list[RayMember] = []
        self._places: dict[str, _Place] = {}
        self._opening: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Raises ConfigError when the address cannot be reached."""
        # Ray's processes die with the thread that starts them; the loop's own pool keeps its threads to the end.
        self._opening = asyncio.get_running_loop().run_in_executor(None, self._init)
        try:
            await asyncio.shield(self._opening)
        except Exception as error:  # Ray raises plain ones too, as when its own start takes too long
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if self._address is None:
                raise ConfigError(
                    f"control.backend: Ray did not start here ({reason.rstrip('.')}). It gives itself 30 s, which a "
                    "busy machine may not keep: try again, or on one machine `--backend subprocess`, which does "
                    f"without Ray; its log: {self._temp_dir}/session_latest/logs",
                    field="control.backend",
                ) from error
            raise ConfigError(
                f"control.ray_address: no Ray cluster could be joined at {self._address}: {reason}",
                field="control.ray_address",
            ) from error

    def _init(self) -> None:
        common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "tandem"}
        if self._address is not None:
            ray.init(address=self._address, **common)
            return
        self._temp_dir.mkdir(mode=0o700, parents=True)
        leave_out_helpers()
        ray.init(
            address="local",
            num_cpus=max(1, round(self._cpus)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._temp_dir),
            _system_config=SYSTEM_CONFIG,
            **common,
        )

    async def place(self, group: str, members: Sequence[Resources]) -> list[MemberHandle]:
        resources = tuple(members)
        place = _Place(resources, _reserve(group, resources), [])
        self._places[group] = place
        try:
            if not await asyncio.to_thread(place.reserved.wait, self._place_timeout_s):
                free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
                raise ConfigError(
                    f"{group}: no Ray node has {place.reserved.bundle_specs} free; Ray has {free}: add a node or ask "
                    "for less",
                    field="models",
                )
        except BaseException:  # also when whoever asked went away: else it would be placed later, for nobody
            await self.give_back(group)
            raise
        place.members += [RayMember(f"{group}.{index}") for index in range(len(resources))]
        self._fill(place)
        return list(place.members)

    async def place_here(self, name: str) -> MemberHandle:
        here = ray.get_runtime_context().get_node_id()
        member = RayMember(name)
        member.live_in(self._actor(name, Resources(), NodeAffinitySchedulingStrategy(here, soft=False)))
        self._here.append(member)
        return member

    async def leaving(self) -> frozenset[str]:
        if self._address is None:
            return frozenset()  # a Ray of our own has this node alone
        return await asyncio.to_thread(self._leaving)

    def _leaving(self) -> frozenset[str]:
        gcs = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
        try:
            # What Ray Serve asks too: there is no public word for it.
            nodes: set[str] = set(gcs.get_draining_nodes(timeout=ASK_TIMEOUT_S))
            table: dict[str, Any] = placement_group_table() if nodes else {}
        except RayError as error:
            log.warning("Ray does not say which nodes leave: %s", error)
            return frozenset()
        there = {key for key, each in table.items() if nodes.intersection(each["bundles_to_node_id"].values())}
        return frozenset(group for group, place in list(self._places.items()) if place.reserved.id.hex() in there)

    def place_anew(self, group: str) -> None:
        place = self._places[group]
        place.give_back()
        place.reserved = _reserve(group, place.resources)
        self._fill(place)

    def _fill(self, place: _Place) -> None:
        """With an actor for each member."""
        for index, (member, resources) in enumerate(zip(place.members, place.resources, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(place.reserved, index)
            member.live_in(self._actor(member.name, resources, strategy))

    def _actor(
        self,
        name: str,
        resources: Resources,
        strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy,
    ) -> Any:
        remote = ray.remote(SupervisorActor)
        return remote.options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            max_restarts=-1,
            scheduling_strategy=strategy,
        ).remote(name, str(self._log_dir))

    async def give_back(self, group: str) -> None:
        if (place := self._places.pop(group, None)) is not None:
            place.give_back()

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)  # a start of Ray can only be waited for
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with contextlib.suppress(RayError):  # the Ray cluster itself may be gone
            if ray.is_initialized():
                for member in self._here:
                    member.kill()
                for place in self._places.values():
                    place.give_back()
        ray.shutdown()
        if self._address is None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)


def _reserve(group: str, resources: Sequence[Resources]) -> PlacementGroup:
    bundles = [{"CPU": each.cpus} | ({"GPU": each.gpus} if each.gpus else {}) for each in resources]
    reserved: PlacementGroup = placement_group(bundles, strategy="STRICT_PACK", name=group)
    return reserved
