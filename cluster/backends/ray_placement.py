"""Places of members on a Ray cluster: a placement group for each worker, whose actors are its ranks, and actors on this
node for routers.

All are detached and named, so they outlive the controller, and the next one finds them. These calls ask Ray's GCS and
block. They run in a thread, one after another, so that a GCS that is away does not stop the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.backends.lease import LEASE_S, Lease
from cluster.backends.protocol import MemberHandle, Resources, Where
from cluster.backends.ray_member import RayMember, SupervisorActor
from cluster.backends.ray_nodes import RayNodes, Reservation, bundles_of
from tandem.config.model import NODE_GROUP_LABEL, Colocate
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

LEASE = "lease"  # the name of the actor that has it
RETRY_S = 0.2
CHOSEN_S = 2.0  # how long a node that looked free may take to be reserved
CALL_S = 10.0  # less than the keeper's patience with a controller

# Ray would hide all GPUs but the actor's own. A rank needs its peers' GPUs too, to read their memory.
ALL_GPUS_VISIBLE = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
# Ray would kill a router with its actor. It drains instead (`RouterLaunch.drains_as_orphan`).
CHILDREN_LIVE_ON = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}

Result = TypeVar("Result")
Strategy = PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy


class GcsCalls:
    """A thread for calls that block. One that is late is left to itself; those behind it are not begun."""

    def __init__(self, limit_s: float = CALL_S) -> None:
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(1, "gcs")

    async def run(self, call: Callable[..., Result], *given: Any) -> Result:
        """Raises TimeoutError if it is late."""
        pending = asyncio.get_running_loop().run_in_executor(self._thread, call, *given)
        try:
            async with asyncio.timeout(self._limit_s):
                return await pending
        except TimeoutError:
            raise TimeoutError(f"Ray's GCS has not answered for {self._limit_s:g} s") from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def others_of(cluster: str, kept: Collection[str]) -> list[str]:
    """Names of a cluster's actors beside `kept` and those of placement groups."""
    names = [name for name in list_named_actors() if name.startswith(f"{cluster}/") and name.count("/") == 1]
    return [name for name in names if name not in kept]


class RayPlacements:
    """`lease` is set before the first call: each call that reserves or releases asks it. `routers_drain`: at the death
    of their actors."""

    def __init__(
        self, cluster: str, log_dir: Path, calls: GcsCalls, *, routers_drain: bool, logs_to_stdout: bool = False
    ) -> None:
        self.lease: Lease | None = None
        self._cluster = cluster
        self._log_dir = log_dir
        self._logs_to_stdout = logs_to_stdout
        self._calls = calls
        self._local_env = CHILDREN_LIVE_ON if routers_drain else None
        self._local: list[RayMember] = []
        self._reservations: dict[str, Reservation] = {}
        self._nodes = RayNodes(self._reservations)
        self._choosing = asyncio.Lock()

    @property
    def _held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    async def place(
        self, group: str, members: Sequence[Resources], where: Where, timeout_s: float
    ) -> list[MemberHandle]:
        """Waits for room for so long. Raises ConfigError if there is none."""
        await self._held.check()
        reservation = Reservation(tuple(members), where, None, [])
        self._reservations[group] = reservation
        try:
            # What an earlier controller reserved is not waited for: Ray may be moving it from a lost node.
            reservation.placement = await self._calls.run(self._found, group)
            if reservation.placement is None and not await self._reserve(group, reservation, timeout_s):
                raise ConfigError(f"{group}: {await self._calls.run(self._nodes.no_room, reservation)}", field="models")
            reservation.members += [RayMember(f"{group}.{index}", self._held) for index in range(len(members))]
            await self._calls.run(self._start_actors, reservation)
        except BaseException:  # cancelled too: otherwise Ray would place the group later, unused
            await self.release(group)
            raise
        return list(reservation.members)

    async def _reserve(self, group: str, reservation: Reservation, timeout_s: float) -> bool:
        """Returns whether there was room in time."""
        where = reservation.where
        if where.colocate is Colocate.REQUIRE:
            return await self._reserve_beside_partner(group, reservation, timeout_s)
        async with self._choosing if where.colocate is Colocate.PREFER else contextlib.nullcontext():
            near = await self._calls.run(self._nodes.near, reservation)
            reservation.placement = await self._calls.run(self.reserve, group, reservation, near)
            if near is not None:  # the next choice has to see this one
                await asyncio.to_thread(reservation.placement.wait, CHOSEN_S)
        return bool(await asyncio.to_thread(reservation.placement.wait, timeout_s))

    async def _reserve_beside_partner(self, group: str, reservation: Reservation, timeout_s: float) -> bool:
        """The node is a hint here too, and checked afterwards: a label would hold the worker there also when it is
        lost."""
        refused: set[str] = set()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            async with self._choosing:
                node = await self._calls.run(self._nodes.beside_partner, reservation, refused)
                if node is None:
                    refused.clear()
                elif await self._got(group, reservation, node):
                    return True
                else:
                    refused.add(node)
            await asyncio.sleep(RETRY_S)
        return False

    async def _got(self, group: str, reservation: Reservation, node: str) -> bool:
        placement = await self._calls.run(self.reserve, group, reservation, node)
        reservation.placement = placement
        is_placed = await asyncio.to_thread(placement.wait, CHOSEN_S)
        if is_placed and (await self._calls.run(self._nodes.node_of)).get(group) == node:
            return True
        reservation.placement = None
        await self._calls.run(remove_placement_group, placement)
        return False

    async def node_group(self, group: str) -> str:
        return await self._calls.run(self._node_group, group)

    def _node_group(self, group: str) -> str:
        reservation = self._reservations.get(group)
        if reservation is not None and reservation.placement is None:  # of an earlier controller, not found yet
            reservation.placement = self._found(group)
        return self._nodes.node_group(group)

    async def place_local(self, name: str) -> MemberHandle:
        await self._held.check()
        here = ray.get_runtime_context().get_node_id()
        member = RayMember(name, self._held)
        strategy = NodeAffinitySchedulingStrategy(here, soft=False)
        await self._calls.run(self._use_actor, member, name, Resources(), strategy, self._local_env)
        self._local.append(member)
        return member

    async def draining(self) -> frozenset[str]:
        return await asyncio.to_thread(self._nodes.draining)

    async def reschedule(self, group: str, end: Callable[[], None], where: Where) -> None:
        await self._held.check()
        reservation = self._reservations[group]
        reservation.where = where
        for member in reservation.members:
            member.hold()
        try:
            end()
            former = reservation.placement
            while self._reservations.get(group) is reservation and not await self._is_moved(group, reservation, former):
                await asyncio.sleep(RETRY_S)
                with contextlib.suppress(RayError, TimeoutError):  # another controller's lease still ends this
                    await self._held.check()
        finally:
            for member in reservation.members:
                member.go_on()

    async def _is_moved(self, group: str, reservation: Reservation, former: PlacementGroup | None) -> bool:
        """Nothing else would try again: a worker without a placement is on no draining node."""
        try:
            await self._calls.run(self._move, group, reservation, former)
        except (RayError, TimeoutError) as error:
            log.warning("%s has no new place yet: %s", group, error)
            return False
        return True

    def _move(self, group: str, reservation: Reservation, former: PlacementGroup | None) -> None:
        if former is not None and reservation.placement is former:
            self._release(group, reservation)
            reservation.placement = None
        if reservation.placement is None:
            found = self._found(group)  # of a call before this that was late
            reservation.placement = found or self.reserve(group, reservation, self._nodes.near(reservation))
        self._start_actors(reservation)

    async def release(self, group: str) -> None:
        await self._held.check()
        if (reservation := self._reservations.pop(group, None)) is not None:
            await self._calls.run(self._release, group, reservation)

    def release_all(self) -> None:
        """Blocks."""
        for member in self._local:
            member.kill()
        for group, reservation in self._reservations.items():
            self._release(group, reservation)

    def _release(self, group: str, reservation: Reservation) -> None:
        for member in reservation.members:
            member.kill()
        # A reservation whose answer was late is found by its name.
        if (placement := reservation.placement or self._found(group)) is not None:
            remove_placement_group(placement)

    def _start_actors(self, reservation: Reservation) -> None:
        """Starts one actor for each member, or finds it. Another placement has other actors."""
        placement = reservation.placement
        assert placement is not None
        for index, (member, resources) in enumerate(zip(reservation.members, reservation.resources, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(placement, index)
            env = ALL_GPUS_VISIBLE if resources.gpus else None
            self._use_actor(member, f"{member.name}/{placement.id.hex()}", resources, strategy, env)

    def _use_actor(
        self, member: RayMember, name: str, resources: Resources, strategy: Strategy, env: dict[str, Any] | None
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
            runtime_env=env,
            scheduling_strategy=strategy,
        )
        actor = options.remote(member.name, str(self._log_dir), self._logs_to_stdout)
        member.use(actor, was_started=False)

    def reserve(self, group: str, reservation: Reservation, near: str | None) -> PlacementGroup:
        """On the node `near` if it still has room. Blocks, but not until there is room."""
        groups, bundles = reservation.where.node_groups, bundles_of(reservation.resources)
        selector = {NODE_GROUP_LABEL: f"in({','.join(groups)})"} if groups else {}
        placement: PlacementGroup = placement_group(
            bundles,
            strategy="STRICT_PACK",
            name=f"{self._cluster}/{group}",
            lifetime="detached",
            bundle_label_selector=[selector] * len(bundles) if selector else None,
            _soft_target_node_id=near,  # private: a label would wait for a node that was taken, or lost, meanwhile
        )
        return placement

    def _found(self, group: str) -> PlacementGroup | None:
        """The placement group that an earlier controller made."""
        with contextlib.suppress(ValueError):
            found: PlacementGroup = get_placement_group(f"{self._cluster}/{group}")
            return found
        return None

    async def release_others(self, groups: Collection[str], local: Collection[str]) -> None:
        await self._held.check()
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
