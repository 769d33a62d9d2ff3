"""Runs members as child processes of the controller: for tests and for machines without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.backends.protocol import MemberEnd, MemberHandle, MemberStart, Resources, RunningProcess
from cluster.backends.supervisor import Supervisor
from cluster.devices import CPU, DeviceBook


class LocalMember:
    """A member whose processes are children of this one. The embedded Redis is one under every backend."""

    def __init__(self, name: str, log_dir: Path, device: str = CPU) -> None:
        self._supervisor = Supervisor(name, log_dir)
        self._device = device

    async def start(self, start: MemberStart) -> None:
        await self._supervisor.start(start, self._device)

    async def wait_end(self) -> MemberEnd:
        return await self._supervisor.wait_end()

    async def processes(self) -> tuple[RunningProcess, ...]:
        return self._supervisor.processes()

    async def stop(self) -> None:
        await self._supervisor.stop()


class SubprocessBackend:
    """`ordinals`: the GPUs that ranks may use."""

    name = "subprocess"

    def __init__(self, log_dir: Path, ordinals: Sequence[int] = ()) -> None:
        self._log_dir = log_dir
        self._devices = DeviceBook(ordinals)

    async def open(self) -> None:
        """Does nothing: members are children of this process."""

    async def place(self, group: str, members: Sequence[Resources]) -> list[MemberHandle]:
        devices = self._assign(group, members)
        return [LocalMember(f"{group}.{index}", self._log_dir, device) for index, device in enumerate(devices)]

    def _assign(self, group: str, members: Sequence[Resources]) -> Sequence[str]:
        first = members[0]  # the ranks of a worker are alike
        if not first.gpus:
            return [CPU] * len(members)
        return self._devices.assign(group, len(members), first.gpus, first.device)

    async def place_local(self, name: str) -> MemberHandle:
        return LocalMember(name, self._log_dir)

    async def release(self, group: str) -> None:
        self._devices.release(group)

    async def draining(self) -> frozenset[str]:
        return frozenset()  # if this host stops, the controller stops with it

    def reschedule(self, group: str) -> None:
        """Never called: no host drains."""

    async def close(self) -> None:
        """Does nothing: the owners have stopped their members."""
