"""What a backend starts: processes in supervised groups, described so that any backend can run them anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from tandem.config.frozen import Frozen


class ProcessSpec(Frozen):
    """One process. `restart`: started again in place when it dies; the end of any other ends its member.

    `stop_grace_s`: from SIGTERM to SIGKILL when it is stopped.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    restart: bool = False
    stop_grace_s: float = 5.0


class MemberStart(Frozen):
    """One life of a member: private files first, then the processes that read them.

    `run_dir` is made with mode 0700 and removed when the member is stopped; `files` maps names in it to contents.
    """

    run_dir: str
    files: dict[str, str]
    processes: tuple[ProcessSpec, ...]


class RunningProcess(Frozen):
    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Resources:
    """What one member needs of the machine it is placed on."""

    cpus: float = 0.0
    gpus: float = 0.0


class MemberHandle(Protocol):
    """A place where one group of processes is kept: a tensor-parallel rank with its agent, or the router."""

    async def start(self, start: MemberStart) -> None:
        """What cannot be started is an end, which `wait_end` tells of."""
        ...

    async def wait_end(self) -> str:
        """Returns why the member ended: a process of it died that is not restarted, or its place was lost."""
        ...

    async def processes(self) -> tuple[RunningProcess, ...]: ...

    async def stop(self) -> None:
        """Ends every process. The member may be started again."""
        ...


class Backend(Protocol):
    """Starts, places and watches members."""

    name: str

    async def open(self) -> None: ...

    async def place(self, group: str, members: Sequence[Resources]) -> list[MemberHandle]:
        """Places for members that must share a host. Raises ConfigError when there is no room for them."""
        ...

    async def place_here(self, name: str) -> MemberHandle:
        """A place on the controller's own host, where the router's addresses are."""
        ...

    async def give_back(self, group: str) -> None:
        """The places of a group whose members were stopped are somebody else's now."""
        ...

    async def leaving(self) -> frozenset[str]:
        """Groups whose host was told to end and still runs."""
        ...

    def place_anew(self, group: str) -> None:
        """Ends what is left of a group's members on a host that leaves. Their handles are of new places from then on,
        where they start as soon as there is room."""
        ...

    async def close(self) -> None:
        """Leaves no process of the backend's own, whatever state it is in; members were stopped by their owners."""
        ...
