"""Runs members as child processes of the keeper: for tests and for machines without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from cluster.backends.protocol import ANYWHERE, MemberHandle, Resources, Where
from cluster.devices import CPU, DeviceBook
from cluster.keeper.keeper import KeeperCalls
from cluster.keeper.members import MemberEnd, MemberStart, RunningMember

ROUTER_PREFIX = "router-"  # of local members; the keeper has others, which are not the backend's


class LocalMember:
    """A member of the keeper. The embedded Redis is one under every backend."""

    def __init__(self, name: str, keeper: KeeperCalls, device: str = CPU) -> None:
        self._name = name
        self._keeper = keeper
        self._device = device

    async def start(self, start: MemberStart) -> None:
        await self._keeper.start(self._name, start, self._device)

    async def wait_end(self) -> MemberEnd:
        return await self._keeper.wait_end(self._name)

    async def running(self) -> RunningMember | None:
        return (await self._keeper.members()).get(self._name)

    async def stop(self) -> None:
        await self._keeper.stop(self._name)


class SubprocessBackend:
    """`ordinals`: the GPUs that ranks may use."""

    name = "subprocess"

    def __init__(self, keeper: KeeperCalls, ordinals: Sequence[int] = ()) -> None:
        self._keeper = keeper
        self._devices = DeviceBook(ordinals)

    async def open(self) -> None:
        """Does nothing: the keeper runs."""

    async def wait_lost(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def is_held(self) -> bool:
        return True  # the keeper hears only its latest controller

    async def keep(self, record: str) -> None:
        await self._keeper.keep(record)

    async def kept(self) -> str:
        return await self._keeper.kept()

    def hold(self, group: str, devices: Sequence[str], each: Resources) -> None:
        self._devices.take(group, devices, each.gpus)

    def devices(self, group: str) -> tuple[str, ...]:
        return self._devices.of(group)

    async def place(self, group: str, members: Sequence[Resources], where: Where = ANYWHERE) -> list[MemberHandle]:
        """`where` says nothing here: there is one host."""
        devices = self._devices.of(group) or self._assign(group, len(members), members[0])  # its ranks are alike
        return [LocalMember(f"{group}.{index}", self._keeper, device) for index, device in enumerate(devices)]

    def _assign(self, group: str, ranks: int, each: Resources) -> Sequence[str]:
        return self._devices.assign(group, ranks, each.gpus, each.device) if each.gpus else [CPU] * ranks

    async def place_local(self, name: str) -> MemberHandle:
        return LocalMember(name, self._keeper)

    async def release_others(self, groups: Collection[str], local: Collection[str]) -> None:
        for name in await self._keeper.members():
            group, _, rank = name.rpartition(".")
            is_rank, is_router = rank.isdigit(), name.startswith(ROUTER_PREFIX)
            if (is_rank and group not in groups) or (not is_rank and is_router and name not in local):
                await self._keeper.stop(name)

    async def release(self, group: str) -> None:
        self._devices.release(group)

    async def node_group(self, group: str) -> str:
        return ""

    async def draining(self) -> frozenset[str]:
        return frozenset()  # if this host stops, the controller stops with it

    async def reschedule(self, group: str, end: Callable[[], None], where: Where) -> None:
        """Never called: no host drains."""

    async def close(self) -> None:
        """Does nothing: the owners have stopped their members."""
