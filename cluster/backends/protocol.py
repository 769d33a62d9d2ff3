"""The interface of a backend, which places and supervises groups of processes, and what the groups are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from tandem.config.frozen import Frozen


class ProcessSpec(Frozen):
    """One process. `restart`: if it dies, it is restarted in place; without `restart` its death ends the member.

    `stop_grace_s`: seconds from SIGTERM to SIGKILL when it is stopped. `on_device`: it uses the member's device, whose
    name is appended to its arguments: `--device cuda:1`.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    restart: bool = False
    stop_grace_s: float = 5.0
    on_device: bool = False


class MemberStart(Frozen):
    """One start of a member: writes private files, then starts the processes that read them.

    `run_dir` is created with mode 0700 and removed when the member stops; `files` maps file names in it to contents.
    """

    run_dir: str
    files: dict[str, str]
    processes: tuple[ProcessSpec, ...]


class RunningProcess(Frozen):
    name: str
    pid: int


class MemberEnd(Frozen):
    """Why a member ended. `exit_code`: of the process that ended it; None if it was killed, or its host was lost."""

    reason: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Resources:
    """What one member reserves on its host. `gpus`: the share of one GPU. `device`: `cpu`, `cuda`, or `cuda:N` for the
    GPU with this ordinal."""

    cpus: float = 0.0
    gpus: float = 0.0
    device: str = "cpu"


class MemberHandle(Protocol):
    """Runs one group of processes: a tensor-parallel rank with its agent, or a router."""

    async def start(self, start: MemberStart) -> None:
        """Raises nothing for a process that cannot start: `wait_end` returns the reason."""
        ...

    async def wait_end(self) -> MemberEnd:
        """Returns why the member ended: a process without `restart` died, or the host was lost."""
        ...

    async def processes(self) -> tuple[RunningProcess, ...]: ...

    async def stop(self) -> None:
        """Stops every process. The member may be started again."""
        ...


class Backend(Protocol):
    """Places groups of members on hosts. A group is one worker; its members are the ranks."""

    name: str

    async def open(self) -> None: ...

    async def place(self, group: str, members: Sequence[Resources]) -> list[MemberHandle]:
        """Reserves one host for all members of the group, and a different GPU of it for each member that uses one. A
        member sees all GPUs of its host. Raises ConfigError if no host has room."""
        ...

    async def place_local(self, name: str) -> MemberHandle:
        """Places a member on the controller's own host, where the routers' addresses are."""
        ...

    async def release(self, group: str) -> None:
        """Releases what a group had reserved. Its members must be stopped."""
        ...

    async def draining(self) -> frozenset[str]:
        """Groups whose host is about to stop and still runs."""
        ...

    def reschedule(self, group: str) -> None:
        """Stops what is left of a group on a draining host. Its handles then refer to new reservations, and the members
        start there as soon as a host has room."""
        ...

    async def close(self) -> None:
        """Stops the backend's own processes, from any state. The owners have stopped their members before."""
        ...
