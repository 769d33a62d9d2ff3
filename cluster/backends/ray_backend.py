"""Members in Ray actors, one per tensor-parallel rank. The only module that imports Ray.

An actor hosts a `Supervisor`; its processes die with it. Ray restarts a lost actor (`max_restarts`); `wait_end` then
returns, and the controller restarts the whole worker in a new epoch. Ray carries control messages only: an actor call
takes about a millisecond.
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

# Ray reads these when it is imported, and so do the processes it starts.
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

from cluster.backends.protocol import MemberEnd, MemberHandle, MemberStart, Resources, RunningProcess
from cluster.backends.supervisor import Supervisor
from cluster.devices import VISIBLE, device_of
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; Tandem stores no objects
RETRY_S = 0.2
GCS_TIMEOUT_S = 2.0
SYSTEM_CONFIG = {
    "worker_niceness": 0,  # ranks would inherit the default, 15, and yield to every other process
    # Detect a frozen node in about 5 s instead of 65 s.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


# Ray would hide all GPUs but the actor's own. A rank needs its peers' GPUs too, to read their memory.
ALL_GPUS_VISIBLE = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


def disable_helpers() -> None:
    """Makes a local Ray cluster start without log monitor, autoscaler and API server.

    Tandem uses none of them, each takes a second of a core and 80 MB, and `ray.init` has no option against them. If a
    Ray version names these methods differently, the helpers start.
    """
    for name in ("start_log_monitor", "start_monitor", "start_api_server"):
        if hasattr(Node, name):
            setattr(Node, name, _start_nothing)


def _start_nothing(node: Node, **settings: object) -> None:
    """Replaces a method that starts a process."""


class SupervisorActor:
    """The actor's body. Messages are JSON, so both sides need not have the same version of a class."""

    def __init__(self, name: str, log_dir: str) -> None:
        self._supervisor = Supervisor(name, Path(log_dir))

    async def start(self, start: str) -> None:
        """Raises ConfigError if Ray gave this actor no GPU that its processes can use."""
        gpu_ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        device = device_of(gpu_ids, os.environ.get(VISIBLE))
        await self._supervisor.start(MemberStart.model_validate_json(start), device)

    async def wait_end(self) -> str:
        return (await self._supervisor.wait_end()).model_dump_json()

    async def processes(self) -> list[tuple[str, int]]:
        return [(process.name, process.pid) for process in self._supervisor.processes()]

    async def stop(self) -> None:
        await self._supervisor.stop()


class RayMember:
    """Calls only `start` on an actor that may not be placed yet: Ray queues calls to it, so others would block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: Any = None
        self._started = False

    def use(self, actor: Any) -> None:
        """Replaces the actor; the previous one is gone."""
        self._actor, self._started = actor, False

    async def start(self, start: MemberStart) -> None:
        while True:
            try:
                await self._actor.start.remote(start.model_dump_json())
                self._started = True
                return
            except RayActorError:
                await asyncio.sleep(RETRY_S)  # Ray is restarting the actor

    async def wait_end(self) -> MemberEnd:
        try:
            return MemberEnd.model_validate_json(await self._actor.wait_end.remote())
        except RayError as error:
            return MemberEnd(reason=f"the Ray actor of {self.name} was lost ({type(error).__name__})")

    async def processes(self) -> tuple[RunningProcess, ...]:
        if not self._started:
            return ()
        try:
            return tuple(RunningProcess(name=name, pid=pid) for name, pid in await self._actor.processes.remote())
        except RayError:
            return ()

    async def stop(self) -> None:
        if not self._started:
            return
        try:
            await self._actor.stop.remote()
        except RayActorError:
            pass  # its processes died with it
        except RayError as error:
            log.warning("%s may not have stopped: %s", self.name, error)

    def kill(self) -> None:
        """Kills the actor and with it the processes."""
        ray.kill(self._actor, no_restart=True)


@dataclass(slots=True)
class _Reservation:
    """One group's resources, placement group and members."""

    resources: tuple[Resources, ...]
    placement: PlacementGroup
    members: list[RayMember]

    def release(self) -> None:
        for member in self.members:
            member.kill()
        remove_placement_group(self.placement)


class RayBackend:
    """`address`: an existing Ray cluster; None starts one on this machine, in `temp_dir`, with `cpus` and `gpus`.

    Nodes of an existing cluster may join late: `place` waits up to `place_timeout_s` for room.
    """

    name = "ray"

    def __init__(
        self, log_dir: Path, temp_dir: Path, *, address: str | None, cpus: float, gpus: int = 0, place_timeout_s: float
    ) -> None:
        self._log_dir = log_dir
        self._temp_dir = temp_dir
        self._address = address
        self._cpus = cpus
        self._gpus = gpus
        self._place_timeout_s = place_timeout_s
        self._local: list[RayMember] = []
        self._reservations: dict[str, _Reservation] = {}
        self._opening: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Raises ConfigError if Ray cannot be started, or joined at `address`."""
        # Ray's processes die with the thread that starts them; the event loop's thread pool keeps its threads.
        self._opening = asyncio.get_running_loop().run_in_executor(None, self._init)
        try:
            await asyncio.shield(self._opening)
        except Exception as error:  # Ray raises plain exceptions too, for instance when its start times out
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if self._address is None:
                raise ConfigError(
                    f"control.backend: Ray did not start here ({reason.rstrip('.')}). Its start times out "
                    "after 30 s, which a busy machine may exceed: try again, or use `--backend subprocess`, which runs "
                    f"on one machine without Ray; its log: {self._temp_dir}/session_latest/logs",
                    field="control.backend",
                ) from error
            raise ConfigError(
                f"control.ray_address: cannot join a Ray cluster at {self._address}: {reason}",
                field="control.ray_address",
            ) from error

    def _init(self) -> None:
        common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "tandem"}
        if self._address is not None:
            ray.init(address=self._address, **common)
            return
        self._temp_dir.mkdir(mode=0o700, parents=True)
        disable_helpers()
        ray.init(
            address="local",
            num_cpus=max(1, round(self._cpus)),
            num_gpus=self._gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._temp_dir),
            _system_config=SYSTEM_CONFIG,
            **common,
        )

    async def place(self, group: str, members: Sequence[Resources]) -> list[MemberHandle]:
        resources = tuple(members)
        reservation = _Reservation(resources, _reserve(group, resources), [])
        self._reservations[group] = reservation
        try:
            if not await asyncio.to_thread(reservation.placement.wait, self._place_timeout_s):
                free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
                raise ConfigError(
                    f"{group}: no Ray node has {reservation.placement.bundle_specs} free; Ray has {free}: add a node "
                    "or ask for less",
                    field="models",
                )
        except BaseException:  # cancelled too: otherwise Ray would place the group later, unused
            await self.release(group)
            raise
        reservation.members += [RayMember(f"{group}.{index}") for index in range(len(resources))]
        self._start_actors(reservation)
        return list(reservation.members)

    async def place_local(self, name: str) -> MemberHandle:
        here = ray.get_runtime_context().get_node_id()
        member = RayMember(name)
        member.use(self._actor(name, Resources(), NodeAffinitySchedulingStrategy(here, soft=False)))
        self._local.append(member)
        return member

    async def draining(self) -> frozenset[str]:
        if self._address is None:
            return frozenset()  # a local Ray cluster has only this node
        return await asyncio.to_thread(self._draining)

    def _draining(self) -> frozenset[str]:
        gcs = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
        try:
            # A private call, which Ray Serve uses too: there is no public one.
            nodes: set[str] = set(gcs.get_draining_nodes(timeout=GCS_TIMEOUT_S))
            table: dict[str, Any] = placement_group_table() if nodes else {}
        except RayError as error:
            log.warning("cannot read which Ray nodes are draining: %s", error)
            return frozenset()
        affected = {key for key, each in table.items() if nodes.intersection(each["bundles_to_node_id"].values())}
        return frozenset(name for name, each in list(self._reservations.items()) if each.placement.id.hex() in affected)

    def reschedule(self, group: str) -> None:
        reservation = self._reservations[group]
        reservation.release()
        reservation.placement = _reserve(group, reservation.resources)
        self._start_actors(reservation)

    def _start_actors(self, reservation: _Reservation) -> None:
        """Starts one actor for each member."""
        for index, (member, resources) in enumerate(zip(reservation.members, reservation.resources, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(reservation.placement, index)
            member.use(self._actor(member.name, resources, strategy))

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
            runtime_env=ALL_GPUS_VISIBLE if resources.gpus else None,
            scheduling_strategy=strategy,
        ).remote(name, str(self._log_dir))

    async def release(self, group: str) -> None:
        if (reservation := self._reservations.pop(group, None)) is not None:
            reservation.release()

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)  # a starting Ray cannot be cancelled
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with contextlib.suppress(RayError):  # the Ray cluster itself may be gone
            if ray.is_initialized():
                for member in self._local:
                    member.kill()
                for reservation in self._reservations.values():
                    reservation.release()
        ray.shutdown()
        if self._address is None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)


def _reserve(group: str, resources: Sequence[Resources]) -> PlacementGroup:
    bundles = [{"CPU": each.cpus} | ({"GPU": each.gpus} if each.gpus else {}) for each in resources]
    placement: PlacementGroup = placement_group(bundles, strategy="STRICT_PACK", name=group)
    return placement
