"""Members in Ray actors, one per tensor-parallel rank. With `ray_head`, the only module that imports Ray.

An actor hosts a `Supervisor`; its processes die with it. Ray restarts a lost actor (`max_restarts`); `wait_end` then
returns, and the controller restarts the whole worker in a new epoch. Ray carries control messages only: an actor call
takes about a millisecond.

Actors and placement groups are detached and named, so they outlive the controller, and the next one finds them. One
more actor holds the lease: the controller that took it last is the only one that may start and stop members.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ray reads these when it is imported, and so do the processes it starts.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.backends.lease import LEASE_S, Fence, Lease, LeaseActor, StaleController, parted, stamped
from cluster.backends.protocol import MemberHandle, Resources
from cluster.devices import VISIBLE, device_of
from cluster.keeper.keeper import KeeperCalls
from cluster.keeper.lossy_output import container_output
from cluster.keeper.members import MemberEnd, MemberStart, ProcessSpec, RunningMember, is_running
from cluster.keeper.supervisor import Supervisor, python
from tandem.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)

NAMESPACE = "tandem"
LEASE = "lease"  # the name of the actor that has it
HEAD = "ray"  # the keeper's name for a local Ray cluster
ADDRESS_FILE = "address"
RETRY_S = 0.2
GCS_TIMEOUT_S = 2.0
RENEW_S = 1.0
JOIN_S = 30.0
ANSWER_S = 10.0  # for a call of an actor that runs

# Ray would hide all GPUs but the actor's own. A rank needs its peers' GPUs too, to read their memory.
ALL_GPUS_VISIBLE = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


class SupervisorActor:
    """The actor's body. Messages are JSON, so both sides need not have the same version of a class.

    `logs_to_stdout`: to that of the container. On a node that is none, there are files all the same.
    """

    def __init__(self, name: str, log_dir: str, logs_to_stdout: bool = False) -> None:
        output = container_output() if logs_to_stdout else None
        if logs_to_stdout and output is None:
            log.warning("%s: this node's container has no standard output to write to: logs go to %s", name, log_dir)
        self._supervisor = Supervisor(name, Path(log_dir), output)
        self._fence = Fence()
        self._changing = asyncio.Lock()
        self._start: MemberStart | None = None
        self._device = ""

    async def start(self, lease: int, start: str) -> None:
        """Raises ConfigError if Ray gave this actor no GPU that its processes can use."""
        self._fence.check(lease)
        gpu_ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        self._device = device_of(gpu_ids, os.environ.get(VISIBLE))
        async with self._changing:  # the stop before it may not have ended in the time that was waited for it
            self._start = MemberStart.model_validate_json(start)
            await self._supervisor.start(self._start, self._device)

    async def wait_end(self) -> str:
        return (await self._supervisor.wait_end()).model_dump_json()

    async def running(self) -> str | None:
        if self._start is None:
            return None
        processes, end = self._supervisor.processes(), self._supervisor.end
        return RunningMember(start=self._start, device=self._device, processes=processes, end=end).model_dump_json()

    async def stop(self, lease: int) -> None:
        self._fence.check(lease)
        async with self._changing:
            self._start = None
            await self._supervisor.stop()


class RayMember:
    """Calls only `start` on an actor that may not be placed yet: Ray queues calls to it, so others would block."""

    def __init__(self, name: str, lease: Lease) -> None:
        self.name = name
        self._lease = lease
        self._actor: Any = None
        self._was_started = False
        self._grace_s = 0.0  # how long its processes may take to stop

    def use(self, actor: Any, *, was_started: bool) -> None:
        """Replaces the actor; the previous one is gone. `was_started`: by an earlier controller."""
        self._actor, self._was_started = actor, was_started

    async def start(self, start: MemberStart) -> None:
        while True:
            try:
                await self._lease.check()
                await self._actor.start.remote(self._lease.number, start.model_dump_json())
                self._was_started, self._grace_s = True, _grace_s(start)
                return
            except RayTaskError:
                raise  # by the actor's own code
            except (RayError, TimeoutError) as error:  # Ray is restarting the actor, or itself
                log.info("%s: cannot start yet (%s)", self.name, type(error).__name__)
                await asyncio.sleep(RETRY_S)

    async def wait_end(self) -> MemberEnd:
        try:
            return MemberEnd.model_validate_json(await self._actor.wait_end.remote())
        except RayError as error:
            return MemberEnd(reason=f"the Ray actor of {self.name} was lost ({type(error).__name__})")

    async def running(self) -> RunningMember | None:
        if not self._was_started:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._actor.running.remote()
        except (RayError, TimeoutError) as error:
            log.warning("%s does not tell what it runs (%s)", self.name, type(error).__name__)
            return None
        if found is None:
            return None
        member = RunningMember.model_validate_json(found)
        self._grace_s = _grace_s(member.start)
        return member

    async def stop(self) -> None:
        if not self._was_started:
            return
        try:
            await self._lease.check()
            async with asyncio.timeout(self._grace_s + ANSWER_S):
                await self._actor.stop.remote(self._lease.number)
        except StaleController:
            raise
        except RayActorError:
            pass  # its processes died with it
        except (RayError, TimeoutError) as error:
            log.warning("%s may not have stopped: %s", self.name, error or type(error).__name__)

    def kill(self) -> None:
        """Kills the actor and with it the processes."""
        ray.kill(self._actor, no_restart=True)


def _grace_s(start: MemberStart) -> float:
    return max((each.stop_grace_s for each in start.processes), default=0.0)


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


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A Ray cluster of this machine, which the keeper runs in `folder`."""

    folder: Path
    cpus: float
    gpus: int

    def start(self) -> MemberStart:
        sizes = ("--cpus", str(max(1, round(self.cpus))), "--gpus", str(self.gpus))
        head = ProcessSpec(name="head", argv=python("cluster.backends.ray_head", str(self.folder), *sizes))
        return MemberStart(run_dir=str(self.folder), files={}, processes=(head,))


def keep_sigterm() -> None:
    """Ray's core replaced the process's handler of SIGTERM with one that dies at once; Python still knows its own."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def others_of(cluster: str, kept: Collection[str]) -> list[str]:
    """Names of a cluster's actors beside `kept` and those of placement groups."""
    names = [name for name in list_named_actors() if name.startswith(f"{cluster}/") and name.count("/") == 1]
    return [name for name in names if name not in kept]


class RayBackend:
    """`where`: the address of an existing Ray cluster, or one that the keeper runs. `holder`: names the keeper.

    Nodes of an existing cluster may join late: `place` waits up to `place_timeout_s` for room.
    """

    name = "ray"

    def __init__(
        self,
        cluster: str,
        holder: str,
        log_dir: Path,
        keeper: KeeperCalls,
        where: str | LocalRay,
        place_timeout_s: float,
        *,
        logs_to_stdout: bool = False,
    ) -> None:
        self._cluster = cluster
        self._holder = holder
        self._log_dir = log_dir
        self._keeper = keeper
        self._where = where
        self._place_timeout_s = place_timeout_s
        self._logs_to_stdout = logs_to_stdout
        self._local: list[RayMember] = []
        self._reservations: dict[str, _Reservation] = {}
        self._opening: asyncio.Future[None] | None = None
        self._lease_actor: Any = None
        self._held: Lease | None = None
        self._renewing: asyncio.Task[str] | None = None
        self._record = ""

    async def open(self) -> None:
        """Raises ConfigError if Ray cannot be started, or joined at its address, or serves this cluster already."""
        address = self._where if isinstance(self._where, str) else await self._start_local(self._where)
        # Ray's processes die with the thread that starts them; the event loop's thread pool keeps its threads.
        self._opening = asyncio.get_running_loop().run_in_executor(None, self._join, address)
        try:
            async with asyncio.timeout(JOIN_S):
                await asyncio.shield(self._opening)
        except TimeoutError:
            if not isinstance(self._where, str):
                await self._keeper.stop(HEAD)  # the next controller starts it again
            raise UnavailableError(f"control.backend: Ray at {address} has not answered for {JOIN_S:g} s") from None
        except Exception as error:  # Ray raises plain exceptions too
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"control.ray_address: cannot join a Ray cluster at {address}: {reason}", field="control.ray_address"
            ) from error
        keep_sigterm()
        await self._take_lease()

    async def _start_local(self, local: LocalRay) -> str:
        """Returns its address. Finds it if an earlier controller started it."""
        start, address = local.start(), local.folder / ADDRESS_FILE
        if not is_running((await self._keeper.members()).get(HEAD), start):
            await self._keeper.stop(HEAD)
            await self._keeper.start(HEAD, start)
        ending = asyncio.ensure_future(self._keeper.wait_end(HEAD))
        try:
            while not address.exists():
                done, _ = await asyncio.wait((ending,), timeout=RETRY_S)
                if done:
                    raise ConfigError(
                        f"control.backend: Ray did not start here ({ending.result().reason.rstrip('.')}). Its start "
                        "times out after 30 s, which a busy machine may exceed: try again, or use "
                        "`--backend subprocess`, which runs on one machine without Ray",
                        field="control.backend",
                    )
        finally:
            ending.cancel()
        return address.read_text()

    def _join(self, address: str) -> None:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, namespace=NAMESPACE)

    async def _take_lease(self) -> None:
        actor = ray.remote(LeaseActor)
        here = ray.get_runtime_context().get_node_id()  # elsewhere it would keep a node that should leave
        self._lease_actor = actor.options(
            name=f"{self._cluster}/{LEASE}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        ).remote()
        after, _ = parted(await self._keeper.kept())
        deadline_s = time.monotonic() + 1.2 * LEASE_S  # so long a dead holder keeps it
        while (lease := await self._taken_lease(after)) is None:
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"name: another `tandem up` runs a cluster named {self._cluster!r} on this Ray cluster: stop it, "
                    "or choose another --name",
                    field="name",
                )
            await asyncio.sleep(RETRY_S)
        self._held = lease
        self._renewing = asyncio.create_task(self._renewed(lease))  # at once: a start may take minutes

    async def _taken_lease(self, after: int) -> Lease | None:
        try:
            return await Lease.take(self._holder, after, self._lease_actor)
        except (RayError, TimeoutError) as error:
            raise UnavailableError(f"control.backend: Ray gives no lease ({type(error).__name__})") from error

    @property
    def _lease(self) -> Lease:
        """After `open`."""
        assert self._held is not None
        return self._held

    async def is_held(self) -> bool:
        if self._held is None:
            return False
        try:
            await self._held.check()
        except (StaleController, RayError, TimeoutError) as error:
            log.warning("this controller leaves the cluster as it is: %s", error or "Ray does not answer")
            return False
        return True

    async def keep(self, record: str) -> None:
        self._record = record
        await self._keeper.keep(stamped(self._lease.number, record))
        await self._lease.keep(record)

    async def kept(self) -> str:
        """The keeper's is at least as new, but is gone if the keeper was another one."""
        _, record = parted(await self._keeper.kept())
        self._record = record or await self._lease_actor.kept.remote()
        return self._record

    async def wait_lost(self) -> str:
        assert self._renewing is not None  # after `open`
        if isinstance(self._where, str):
            return await asyncio.shield(self._renewing)
        tasks = {asyncio.ensure_future(each) for each in (asyncio.shield(self._renewing), self._head_end())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()

    async def _head_end(self) -> str:
        return (await self._keeper.wait_end(HEAD)).reason

    async def _renewed(self, lease: Lease) -> str:
        """Renews the lease until another controller has it, or Ray does not answer for LEASE_S."""
        last_s = time.monotonic()
        while True:
            try:
                await lease.renew(self._record)
                last_s = time.monotonic()
            except StaleController as error:
                return str(error)
            except (RayError, TimeoutError) as error:
                log.warning("Ray does not answer (%s)", type(error).__name__)
                if time.monotonic() - last_s > LEASE_S:
                    return f"Ray has not answered for {LEASE_S:g} s ({type(error).__name__})"
            await asyncio.sleep(RENEW_S)

    def hold(self, group: str, devices: Sequence[str], each: Resources) -> None:
        """Does nothing: a placement group keeps its devices."""

    def devices(self, group: str) -> tuple[str, ...]:
        return ()

    async def place(self, group: str, members: Sequence[Resources]) -> list[MemberHandle]:
        await self._lease.check()
        resources = tuple(members)
        found = self._found(group)
        reservation = _Reservation(resources, found or self._reserve(group, resources), [])
        self._reservations[group] = reservation
        try:
            # What an earlier controller reserved is not waited for: Ray may be moving it from a lost node.
            if found is None and not await asyncio.to_thread(reservation.placement.wait, self._place_timeout_s):
                free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
                raise ConfigError(
                    f"{group}: no Ray node has {reservation.placement.bundle_specs} free; Ray has {free}: add a node "
                    "or ask for less",
                    field="models",
                )
        except BaseException:  # cancelled too: otherwise Ray would place the group later, unused
            await self.release(group)
            raise
        reservation.members += [RayMember(f"{group}.{index}", self._lease) for index in range(len(resources))]
        self._start_actors(reservation)
        return list(reservation.members)

    async def place_local(self, name: str) -> MemberHandle:
        await self._lease.check()
        here = ray.get_runtime_context().get_node_id()
        member = RayMember(name, self._lease)
        self._use_actor(member, name, Resources(), NodeAffinitySchedulingStrategy(here, soft=False))
        self._local.append(member)
        return member

    async def draining(self) -> frozenset[str]:
        if not isinstance(self._where, str):
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

    async def reschedule(self, group: str, end: Callable[[], None]) -> None:
        await self._lease.check()
        end()
        reservation = self._reservations[group]
        reservation.release()
        reservation.placement = self._reserve(group, reservation.resources)
        self._start_actors(reservation)

    def _start_actors(self, reservation: _Reservation) -> None:
        """Starts one actor for each member, or finds it. Another placement has other actors."""
        placement = reservation.placement
        for index, (member, resources) in enumerate(zip(reservation.members, reservation.resources, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(placement, index)
            self._use_actor(member, f"{member.name}/{placement.id.hex()}", resources, strategy)

    def _use_actor(
        self,
        member: RayMember,
        name: str,
        resources: Resources,
        strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy,
    ) -> None:
        full_name = f"{self._cluster}/{name}"
        with contextlib.suppress(ValueError):  # there is none
            member.use(ray.get_actor(full_name), was_started=True)
            return
        remote = ray.remote(SupervisorActor)
        options = remote.options(
            name=full_name,
            lifetime="detached",
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            max_restarts=-1,
            runtime_env=ALL_GPUS_VISIBLE if resources.gpus else None,
            scheduling_strategy=strategy,
        )
        actor = options.remote(member.name, str(self._log_dir), self._logs_to_stdout)
        member.use(actor, was_started=False)

    def _reserve(self, group: str, resources: Sequence[Resources]) -> PlacementGroup:
        bundles = [{"CPU": each.cpus} | ({"GPU": each.gpus} if each.gpus else {}) for each in resources]
        name = f"{self._cluster}/{group}"
        placement: PlacementGroup = placement_group(bundles, strategy="STRICT_PACK", name=name, lifetime="detached")
        return placement

    def _found(self, group: str) -> PlacementGroup | None:
        """The placement group that an earlier controller made."""
        with contextlib.suppress(ValueError):
            found: PlacementGroup = get_placement_group(f"{self._cluster}/{group}")
            return found
        return None

    async def release_others(self, groups: Collection[str], local: Collection[str]) -> None:
        await self._lease.check()
        await asyncio.to_thread(self._release_others, groups, local)

    def _release_others(self, groups: Collection[str], local: Collection[str]) -> None:
        table: dict[str, Any] = placement_group_table()
        for name in [each["name"] for each in table.values() if each["state"] != "REMOVED"]:
            cluster, _, group = name.partition("/")
            if cluster == self._cluster and group not in groups and (found := self._found(group)) is not None:
                remove_placement_group(found)  # and with it its actors
        kept = {f"{self._cluster}/{name}" for name in (LEASE, *local)}
        for name in others_of(self._cluster, kept):
            with contextlib.suppress(ValueError):  # gone meanwhile
                ray.kill(ray.get_actor(name), no_restart=True)
        deadline_s = time.monotonic() + LEASE_S
        while others_of(self._cluster, kept):  # else one that is ending would be found by its name
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"name: actors of an earlier cluster {self._cluster!r} do not end on this Ray cluster: end them, "
                    "or choose another --name",
                    field="name",
                )
            time.sleep(RETRY_S)  # in a thread

    async def release(self, group: str) -> None:
        await self._lease.check()
        if (reservation := self._reservations.pop(group, None)) is not None:
            reservation.release()

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)  # a joining driver cannot be cancelled
        is_held = await self.is_held()
        if self._renewing is not None:
            self._renewing.cancel()
        await asyncio.to_thread(self._close, is_held)
        if not isinstance(self._where, str):
            await self._keeper.stop(HEAD)

    def _close(self, is_held: bool) -> None:
        with contextlib.suppress(RayError):  # the Ray cluster itself may be gone
            if is_held:
                for member in self._local:
                    member.kill()
                for reservation in self._reservations.values():
                    reservation.release()
                ray.kill(self._lease_actor, no_restart=True)
        ray.shutdown()
