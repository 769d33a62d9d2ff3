"""The interface of a backend, which places groups of members on hosts and runs them there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.keeper.members import MemberEnd, MemberStart, RunningMember
from tandem.config.model import Colocate


@dataclass(frozen=True, slots=True)
class Resources:
    """What one member reserves on its host. `gpus`: the share of one GPU. `device`: `cpu`, `cuda`, or `cuda:N` for the
    GPU with this ordinal."""

    cpus: float = 0.0
    gpus: float = 0.0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Where:
    """Which hosts a worker may be on. `node_groups`: empty for any. `alike`, `partners`: the model's other workers of
    its own and of the other role, placed or not yet. `partner`: what one of the latter reserves."""

    node_groups: tuple[str, ...] = ()
    colocate: Colocate = Colocate.NO
    alike: tuple[str, ...] = ()
    partners: tuple[str, ...] = ()
    partner: tuple[Resources, ...] = ()


ANYWHERE = Where()


class MemberHandle(Protocol):
    """Runs one group of processes: a tensor-parallel rank with its agent, or a router."""

    async def start(self, start: MemberStart) -> None:
        """Raises nothing for a process that cannot start: `wait_end` returns the reason."""
        ...

    async def wait_end(self) -> MemberEnd:
        """Returns why the member ended: a process without `restart` died, or the host was lost."""
        ...

    async def running(self) -> RunningMember | None:
        """The last start, even of an earlier controller; None if there was none, or the member was stopped."""
        ...

    async def stop(self) -> None:
        """Stops every process. The member may be started again."""
        ...


class Backend(Protocol):
    """Places groups of members on hosts. A group is one worker; its members are the ranks."""

    name: str

    async def open(self) -> None: ...

    async def wait_lost(self) -> str:
        """Returns why this controller can use the backend no more."""
        ...

    async def is_held(self) -> bool:
        """Whether this controller may still stop what runs: no other has taken the cluster over."""
        ...

    async def keep(self, record: str) -> None:
        """Replaces the record, which the next controller of this cluster reads by `kept`."""
        ...

    async def kept(self) -> str:
        """The last record; empty if there was none."""
        ...

    def hold(self, group: str, devices: Sequence[str], each: Resources) -> None:
        """Reserves the devices that an earlier controller recorded for a group, before any group is placed."""
        ...

    def devices(self, group: str) -> tuple[str, ...]:
        """What to record for `hold`, a device for each member; empty if the backend itself outlives the controller."""
        ...

    async def place(self, group: str, members: Sequence[Resources], where: Where = ANYWHERE) -> list[MemberHandle]:
        """Reserves one host for all members of the group, and a different GPU of it for each member that uses one. A
        member sees all GPUs of its host. A group that an earlier controller placed stays where it is.

        Raises ConfigError if no host has room.
        """
        ...

    async def place_local(self, name: str) -> MemberHandle:
        """Places a member on the controller's own host, where the routers' addresses are."""
        ...

    async def release_others(self, groups: Collection[str], local: Collection[str]) -> None:
        """Stops and releases every other group and local member that an earlier controller placed."""
        ...

    async def release(self, group: str) -> None:
        """Releases what a group had reserved. Its members must be stopped."""
        ...

    async def node_group(self, group: str) -> str:
        """Of the host where the group is; empty if the host has none."""
        ...

    async def draining(self) -> frozenset[str]:
        """Groups whose host is about to stop and still runs."""
        ...

    async def reschedule(self, group: str, end: Callable[[], None], where: Where) -> None:
        """Stops what is left of a group on a draining host. Its handles then refer to new reservations, and the members
        start there as soon as a host has room. Calls `end`, which ends the epoch there, and lets no member start until
        the new ones are reserved: the next epoch must not start on that host."""
        ...

    async def close(self) -> None:
        """Stops the backend's own processes, from any state. The owners have stopped their members before."""
        ...
