"""The keeper starts the processes of one machine, sees their ends and stops them. All of them die with it.

It decides nothing: the controller, which is one of its members, tells it what to start and stop. What must outlive the
controller is here: the members, and a record that only controllers read.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from cluster.devices import CPU
from cluster.keeper.lossy_output import LossyOutput
from cluster.keeper.members import MemberEnd, MemberStart, RunningMember
from cluster.keeper.supervisor import Supervisor


class KeeperCalls(Protocol):
    """What a controller asks of its keeper: `Keeper` in the same process, `RemoteKeeper` from another."""

    async def start(self, name: str, start: MemberStart, device: str = CPU) -> None:
        """Starts a member that does not run. If a process cannot start, `wait_end` returns the reason."""
        ...

    async def wait_end(self, name: str) -> MemberEnd:
        """Returns why the member ended, or that it was stopped."""
        ...

    async def members(self) -> dict[str, RunningMember]:
        """Every member that was not stopped, by name."""
        ...

    async def stop(self, name: str) -> None:
        """Stops the member's processes. Does nothing for a name that is not there."""
        ...

    async def keep(self, record: str) -> None:
        """Replaces the record, which the next controller reads by `kept`."""
        ...

    async def kept(self) -> str:
        """The last record; empty if there was none."""
        ...


class _Member:
    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.changing = asyncio.Lock()
        self.start: MemberStart | None = None  # None: it was stopped, or is being stopped
        self.device = CPU

    async def running(self) -> RunningMember | None:
        if self.start is None:
            return None
        async with self.changing:  # an earlier controller may have been starting it
            processes, end = self.supervisor.processes(), self.supervisor.end
        return RunningMember(start=self.start, device=self.device, processes=processes, end=end) if self.start else None


class Keeper:
    """`log_dir`, `output`: where the processes' logs go, see `Supervisor`."""

    def __init__(self, log_dir: Path, output: LossyOutput | None = None) -> None:
        self._log_dir = log_dir
        self._output = output
        self._members: dict[str, _Member] = {}
        self._record = ""

    async def start(self, name: str, start: MemberStart, device: str = CPU) -> None:
        member = self._members.setdefault(name, _Member(Supervisor(name, self._log_dir, self._output)))
        async with member.changing:
            member.start, member.device = start, device
            await member.supervisor.start(start, device)

    async def wait_end(self, name: str) -> MemberEnd:
        member = self._members.get(name)
        return MemberEnd(reason=f"{name} was not started") if member is None else await member.supervisor.wait_end()

    async def members(self) -> dict[str, RunningMember]:
        found = {name: await member.running() for name, member in list(self._members.items())}
        return {name: running for name, running in found.items() if running is not None}

    async def stop(self, name: str) -> None:
        if (member := self._members.get(name)) is None:
            return
        async with member.changing:
            member.start = None
            await member.supervisor.stop()

    async def keep(self, record: str) -> None:
        self._record = record

    async def kept(self) -> str:
        return self._record

    async def close(self) -> None:
        """Stops every member."""
        await asyncio.gather(*(self.stop(name) for name in self._members))
