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
from pathlib import Path
from typing import Any

# Read by Ray when it is imported and by the processes it starts.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray._private.node import Node
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.processes import MemberHandle, MemberStart, Resources, RunningProcess
from cluster.supervisor import Supervisor
from tandem.errors import ConfigError

OBJECT_STORE_BYTES = 80 << 20  # Ray's least; nothing of ours goes through it
RETRY_S = 0.2
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
    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    async def start(self, start: MemberStart) -> None:
        while True:
            try:
                await self._actor.start.remote(start.model_dump_json())
                return
            except RayActorError:
                await asyncio.sleep(RETRY_S)  # Ray is bringing the actor back

    async def wait_end(self) -> str:
        try:
            end: str = await self._actor.wait_end.remote()
            return end
        except RayActorError:
            return f"the Ray actor of {self._name} was lost"

    async def processes(self) -> tuple[RunningProcess, ...]:
        try:
            return tuple(RunningProcess(name=name, pid=pid) for name, pid in await self._actor.processes.remote())
        except RayActorError:
            return ()

    async def stop(self) -> None:
        try:
            await self._actor.stop.remote()
        except RayActorError:
            pass  # its processes died with it


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
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, PlacementGroup] = {}
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
        bundles = [{"CPU": member.cpus} | ({"GPU": member.gpus} if member.gpus else {}) for member in members]
        placed = placement_group(bundles, strategy="STRICT_PACK", name=group)
        self._groups[group] = placed
        try:
            if not await asyncio.to_thread(placed.wait, self._place_timeout_s):
                free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
                raise ConfigError(
                    f"{group}: no Ray node has {bundles} free; Ray has {free}: add a node or ask for less",
                    field="models",
                )
        except BaseException:  # also when whoever asked went away: else it would be placed later, for nobody
            await self.give_back(group)
            raise
        return [
            self._actor(f"{group}.{index}", member, PlacementGroupSchedulingStrategy(placed, index))
            for index, member in enumerate(members)
        ]

    async def place_here(self, name: str) -> MemberHandle:
        here = ray.get_runtime_context().get_node_id()
        return self._actor(name, Resources(), NodeAffinitySchedulingStrategy(here, soft=False))

    def _actor(
        self,
        name: str,
        member: Resources,
        strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy,
    ) -> MemberHandle:
        remote = ray.remote(SupervisorActor)
        actor = remote.options(
            num_cpus=member.cpus,
            num_gpus=member.gpus,
            max_restarts=-1,
            scheduling_strategy=strategy,
        ).remote(name, str(self._log_dir))
        self._actors[name] = actor
        return RayMember(name, actor)

    async def give_back(self, group: str) -> None:
        for name in [name for name in self._actors if name.rpartition(".")[0] == group]:
            ray.kill(self._actors.pop(name), no_restart=True)
        if (placed := self._groups.pop(group, None)) is not None:
            remove_placement_group(placed)

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)  # a start of Ray can only be waited for
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with contextlib.suppress(RayError):  # the Ray cluster itself may be gone
            if ray.is_initialized():
                for actor in self._actors.values():
                    ray.kill(actor, no_restart=True)
                for group in self._groups.values():
                    remove_placement_group(group)
        ray.shutdown()
        if self._address is None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
