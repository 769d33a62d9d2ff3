"""A member in a Ray actor: one tensor-parallel rank, or a router.

An actor hosts a `Supervisor`; its processes die with it. Ray restarts a lost actor (`max_restarts`); `wait_end` then
returns, and the controller restarts the whole worker in a new epoch. Ray carries control messages only: an actor call
takes about a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.backends.lease import Fence, Lease, StaleController
from cluster.devices import VISIBLE, device_of
from cluster.keeper.lossy_output import container_output
from cluster.keeper.members import MemberEnd, MemberStart, RunningMember
from cluster.keeper.supervisor import Supervisor

log = logging.getLogger(__name__)

RETRY_S = 0.2
ANSWER_S = 10.0  # for a call of an actor that runs


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
    """Calls only `start` on an actor that may not be placed yet: Ray queues calls to it, so others would block.

    Between `hold` and `go_on` the actor is being replaced, and no start begins.
    """

    def __init__(self, name: str, lease: Lease) -> None:
        self.name = name
        self._lease = lease
        self._actor: Any = None
        self._was_started = False
        self._grace_s = 0.0  # how long its processes may take to stop
        self._may_start = asyncio.Event()
        self._may_start.set()

    def use(self, actor: Any, *, was_started: bool) -> None:
        """Replaces the actor; the previous one is gone. `was_started`: by an earlier controller."""
        self._actor, self._was_started = actor, was_started

    def hold(self) -> None:
        self._may_start.clear()

    def go_on(self) -> None:
        self._may_start.set()

    async def start(self, start: MemberStart) -> None:
        while True:
            await self._may_start.wait()
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
        await self._may_start.wait()
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
        actor = self._actor  # another one may replace it meanwhile
        try:
            await self._lease.check()
            async with asyncio.timeout(self._grace_s + ANSWER_S):
                await actor.stop.remote(self._lease.number)
        except StaleController:
            raise
        except RayActorError:
            pass  # its processes died with it
        except (RayError, TimeoutError) as error:
            log.warning("%s may not have stopped: %s", self.name, str(error) or type(error).__name__)

    def kill(self) -> None:
        """Kills the actor and with it the processes. Asks the GCS, and blocks."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)


def _grace_s(start: MemberStart) -> float:
    return max((each.stop_grace_s for each in start.processes), default=0.0)
