"""A rank that only records how it was started: for tests of device assignment without GPUs.

    python -m cluster.testing.recorder FOLDER NAME --device cuda:1

Writes FOLDER/NAME.json with its arguments and the GPUs that it sees, then waits until it is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.backends.protocol import ANYWHERE, Backend, MemberHandle, Resources, Where
from cluster.keeper.members import MemberEnd, MemberStart, ProcessSpec, RunningMember
from cluster.keeper.supervisor import python


@dataclass(slots=True)
class RecordingBackend:
    """Another backend, with recorders instead of the processes that use a device, and without the others."""

    inner: Backend
    folder: Path
    name: str = "recording"

    async def open(self) -> None:
        await self.inner.open()

    async def wait_lost(self) -> str:
        return await self.inner.wait_lost()

    async def is_held(self) -> bool:
        return await self.inner.is_held()

    async def keep(self, record: str) -> None:
        await self.inner.keep(record)

    async def kept(self) -> str:
        return await self.inner.kept()

    def hold(self, group: str, devices: Sequence[str], each: Resources) -> None:
        self.inner.hold(group, devices, each)

    def devices(self, group: str) -> tuple[str, ...]:
        return self.inner.devices(group)

    async def place(self, group: str, members: Sequence[Resources], where: Where = ANYWHERE) -> list[MemberHandle]:
        return [RecordingMember(each, group, self.folder) for each in await self.inner.place(group, members, where)]

    async def place_local(self, name: str) -> MemberHandle:
        return await self.inner.place_local(name)

    async def release_others(self, groups: Collection[str], local: Collection[str]) -> None:
        await self.inner.release_others(groups, local)

    async def release(self, group: str) -> None:
        await self.inner.release(group)

    async def node_group(self, group: str) -> str:
        return await self.inner.node_group(group)

    async def draining(self) -> frozenset[str]:
        return await self.inner.draining()

    async def reschedule(self, group: str, end: Callable[[], None], where: Where) -> None:
        await self.inner.reschedule(group, end, where)

    async def close(self) -> None:
        await self.inner.close()


@dataclass(frozen=True, slots=True)
class RecordingMember:
    inner: MemberHandle
    group: str
    folder: Path

    async def start(self, start: MemberStart) -> None:
        recorders = tuple(self._recorder(each) for each in start.processes if each.on_device)
        await self.inner.start(start.model_copy(update={"processes": recorders}))

    def _recorder(self, spec: ProcessSpec) -> ProcessSpec:
        argv = python(__name__, str(self.folder), f"{self.group}.{spec.name}")
        return spec.model_copy(update={"argv": argv})

    async def wait_end(self) -> MemberEnd:
        return await self.inner.wait_end()

    async def running(self) -> RunningMember | None:
        return await self.inner.running()

    async def stop(self) -> None:
        await self.inner.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    record = {"device": options.device, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    partial = options.folder / f"{options.name}.partial"
    partial.write_text(json.dumps(record))
    partial.rename(partial.with_suffix(".json"))
    signal.pause()


if __name__ == "__main__":
    main()
