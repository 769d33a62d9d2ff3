"""The backend on Ray: joins a Ray cluster, local or not, and takes the lease of this cluster there.

Members are in actors (`ray_member`), which `ray_placement` places. One more actor holds the lease: the controller that
took it last is the only one that may start and stop members.
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
from ray.exceptions import RayError
from ray.experimental import internal_kv

from cluster.backends.lease import LEASE_S, Lease, LeaseActor, StaleController, parted, stamped
from cluster.backends.protocol import ANYWHERE, MemberHandle, Resources, Where
from cluster.backends.ray_member import SupervisorActor  # noqa: F401 - actors of earlier releases look for it here
from cluster.backends.ray_placement import LEASE, GcsCalls, RayPlacements
from cluster.keeper.keeper import KeeperCalls
from cluster.keeper.members import MemberStart, ProcessSpec, is_running
from cluster.keeper.supervisor import python
from tandem.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)

NAMESPACE = "tandem"
HEAD = "ray"  # the keeper's name for a local Ray cluster
ADDRESS_FILE = "address"
RETRY_S = 0.2
RENEW_S = 1.0
JOIN_S = 30.0
ON_HEAD = "node:__internal_head__"  # a resource of the head's node; an actor elsewhere would keep its node from leaving


@dataclass(frozen=True, slots=True)
class GcsStore:
    """A text in Ray's GCS. With a Redis for Ray's tables (GCS fault tolerance) it outlives the head's node."""

    key: str

    def read(self) -> str:
        return (internal_kv._internal_kv_get(self.key, namespace=NAMESPACE) or b"").decode()

    def write(self, text: str) -> None:
        if text:
            internal_kv._internal_kv_put(self.key, text, overwrite=True, namespace=NAMESPACE)
        else:
            internal_kv._internal_kv_del(self.key, namespace=NAMESPACE)


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
        self._keeper = keeper
        self._where = where
        self._place_timeout_s = place_timeout_s
        self._calls = GcsCalls()
        self._placements = RayPlacements(
            cluster, log_dir, self._calls, routers_drain=isinstance(where, str), logs_to_stdout=logs_to_stdout
        )
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
        try:
            self._lease_actor = await self._calls.run(self._start_lease_actor)
        except TimeoutError as error:
            raise UnavailableError(f"control.backend: {error}") from None
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
        self._held = self._placements.lease = lease
        self._renewing = asyncio.create_task(self._renewed(lease))  # at once: a start may take minutes

    def _start_lease_actor(self) -> Any:
        """Or finds it. Blocks."""
        actor = ray.remote(LeaseActor)
        return actor.options(
            name=f"{self._cluster}/{LEASE}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            resources={ON_HEAD: 0.001},
            max_restarts=-1,
        ).remote(store=GcsStore(f"{self._cluster}/record"))

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

    async def place(self, group: str, members: Sequence[Resources], where: Where = ANYWHERE) -> list[MemberHandle]:
        if not isinstance(self._where, str):
            where = ANYWHERE  # a local Ray cluster has only this node
        return await self._placements.place(group, members, where, self._place_timeout_s)

    async def place_local(self, name: str) -> MemberHandle:
        return await self._placements.place_local(name)

    async def node_group(self, group: str) -> str:
        return await self._placements.node_group(group)

    async def draining(self) -> frozenset[str]:
        if not isinstance(self._where, str):
            return frozenset()  # a local Ray cluster has only this node
        return await self._placements.draining()

    async def reschedule(self, group: str, end: Callable[[], None], where: Where) -> None:
        await self._placements.reschedule(group, end, where)

    async def release_others(self, groups: Collection[str], local: Collection[str]) -> None:
        await self._placements.release_others(groups, local)

    async def release(self, group: str) -> None:
        await self._placements.release(group)

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)  # a joining driver cannot be cancelled
        is_held = await self.is_held()
        if self._renewing is not None:
            self._renewing.cancel()
        await asyncio.to_thread(self._close, is_held)
        self._calls.close()
        if not isinstance(self._where, str):
            await self._keeper.stop(HEAD)

    def _close(self, is_held: bool) -> None:
        with contextlib.suppress(RayError):  # the Ray cluster itself may be gone
            if is_held:
                self._placements.release_all()
                with contextlib.suppress(AttributeError):  # an earlier release started it
                    ray.get(self._lease_actor.forget.remote(), timeout=LEASE_S)
                ray.kill(self._lease_actor, no_restart=True)
        ray.shutdown()
