"""Members as children of the controller. For tests and for machines without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.backends.protocol import MemberHandle, MemberStart, Resources, RunningProcess
from cluster.backends.supervisor import Supervisor


class LocalMember:
    """A member among this process's own children: the controller's Redis, whatever the backend."""

    def __init__(self, name: str, log_dir: Path) -> None:
        self._supervisor = Supervisor(name, log_dir)

    async def start(self, start: MemberStart) -> None:
        await self._supervisor.start(start)

    async def wait_end(self) -> str:
        return await self._supervisor.wait_end()

    async def processes(self) -> tuple[RunningProcess, ...]:
        return self._supervisor.processes()

    async def stop(self) -> None:
        await self._supervisor.stop()


class SubprocessBackend:
    name = "subprocess"

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir

    async def open(self) -> None:
        """Nothing to open: members are children of this process."""

    async def place(self, group: str, members: Sequence[Resources]) -> list[MemberHandle]:
        return [LocalMember(f"{group}.{index}", self._log_dir) for index in range(len(members))]

    async def place_here(self, name: str) -> MemberHandle:
        return LocalMember(name, self._log_dir)

    async def give_back(self, group: str) -> None:
        """Nothing was taken."""

    async def leaving(self) -> frozenset[str]:
        return frozenset()  # this host leaves with the controller alone

    def place_anew(self, group: str) -> None:
        """Nothing leaves."""

    async def close(self) -> None:
        """Nothing to close: every member was stopped by its owner."""
