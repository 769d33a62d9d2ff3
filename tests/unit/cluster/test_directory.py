"""The directory as whole lists and as changes, from the controller to those who follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.directory import Directory
from router.testing.controller import StubController
from router.workers.directory import DirectoryFollower
from tandem.rpc.directory import DirectoryGap, apply_directory, directory_changes
from tandem.v1 import cluster_pb2

NAMES = [f"decode-{number}" for number in range(4)]
ENTRIES = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3))
DIRECTORIES = st.lists(st.tuples(ENTRIES, ENTRIES), min_size=1, max_size=6)


def worker(name: str, epoch: int = 1) -> cluster_pb2.WorkerInfo:
    return cluster_pb2.WorkerInfo(worker_id=name, epoch=epoch, model="m", role=cluster_pb2.ROLE_DECODE)


def make(version: int, workers: dict[str, int], places: dict[str, int]) -> cluster_pb2.Directory:
    return cluster_pb2.Directory(
        version=version,
        workers=[worker(name, epoch) for name, epoch in workers.items()],
        places=[cluster_pb2.WorkerPlace(worker_id=name, restarts=count) for name, count in places.items()],
        autoscaler_decisions={"start": version},
    )


def in_order(directory: cluster_pb2.Directory) -> cluster_pb2.Directory:
    found = cluster_pb2.Directory()
    found.CopyFrom(directory)
    found.workers.sort(key=lambda each: each.worker_id)
    found.places.sort(key=lambda each: each.worker_id)
    return found


@given(DIRECTORIES)
def test_changes_lead_from_any_version_to_any_other(states: list[tuple[dict[str, int], dict[str, int]]]) -> None:
    versions = [make(number, *state) for number, state in enumerate(states, 1)]
    known = apply_directory(None, versions[0])
    for before, now in pairwise(versions):
        changes = directory_changes(before, now)
        kept = {each.worker_id: each for each in before.workers}
        assert all(kept.get(each.worker_id) != each for each in changes.workers), "what did not change is not sent"
        known = apply_directory(known, changes)
        assert in_order(known) == in_order(now)


@pytest.mark.parametrize("known", [None, make(3, {}, {})])
def test_changes_of_another_version_are_a_gap(known: cluster_pb2.Directory | None) -> None:
    changes = directory_changes(make(2, {}, {}), make(4, {NAMES[0]: 1}, {}))
    with pytest.raises(DirectoryGap, match="got of 2"):
        apply_directory(known, changes)


@pytest.mark.parametrize("takes_changes", [True, False])
async def test_only_a_follower_that_takes_changes_gets_them(takes_changes: bool) -> None:
    directory = Directory()
    for name in NAMES:
        directory.put(worker(name))
    messages = directory.follow(takes_changes=takes_changes)
    whole = await anext(messages)
    assert (whole.base_version, len(whole.workers)) == (0, len(NAMES))
    directory.remove(NAMES[0])
    directory.put(worker(NAMES[1], epoch=2))  # both in one message
    message = await anext(messages)
    if takes_changes:
        assert message.base_version == whole.version
        assert [each.worker_id for each in message.workers] == [NAMES[1]]
        assert [*message.removed_workers] == [NAMES[0]]
    else:
        assert message == directory.snapshot()
    assert in_order(apply_directory(whole, message)) == in_order(directory.snapshot())


class LossyController(StubController):
    """Sends the changes of a directory, except those that make the version `lost`."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.lost = 0
        self.is_lost = asyncio.Event()
        self.whole_lists = 0

    async def WatchDirectory(
        self, request: cluster_pb2.WatchDirectoryRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.Directory]:
        async for message in self.directory.follow(takes_changes=request.takes_changes):
            self.whole_lists += not message.base_version
            if message.version == self.lost:
                self.is_lost.set()
            else:
                yield message


class Follower:
    """What a router knows of a controller."""

    def __init__(self, address: str) -> None:
        self.known = cluster_pb2.Directory()
        self._changed = asyncio.Event()
        self.following = DirectoryFollower(address, "router-0", self._on_directory)
        self.following.start()

    def _on_directory(self, directory: cluster_pb2.Directory) -> None:
        self.known = directory
        self._changed.set()

    async def has(self, directory: Directory) -> None:
        """Raises TimeoutError unless it soon knows all of this version."""
        async with asyncio.timeout(30.0):
            while in_order(self.known) != in_order(directory.snapshot()):
                self._changed.clear()
                await self._changed.wait()


async def test_a_follower_that_lost_a_change_asks_for_the_whole_list() -> None:
    controller = LossyController()
    await controller.start()
    follower = Follower(controller.address)
    try:
        controller.directory.put(worker(NAMES[0]))
        await follower.has(controller.directory)
        controller.directory.put(worker(NAMES[1]))
        await follower.has(controller.directory)
        assert controller.whole_lists == 1, "the second worker came as a change"

        controller.lost = controller.directory.snapshot().version + 1
        controller.directory.remove(NAMES[0])
        async with asyncio.timeout(30.0):
            await controller.is_lost.wait()
        controller.directory.put(worker(NAMES[2]))
        await follower.has(controller.directory)
        assert controller.whole_lists == 2
    finally:
        await follower.following.close()
        await controller.stop()


async def test_a_follower_of_a_new_controller_starts_with_the_whole_list() -> None:
    """Versions of two controllers are not of one order."""
    first, second = LossyController(), LossyController()
    await first.start()
    follower = Follower(first.address)
    try:
        for name in NAMES:
            first.directory.put(worker(name))
        await follower.has(first.directory)
        port = first.address.rpartition(":")[2]
        await first.stop()
        second.directory.put(worker(NAMES[3], epoch=2))
        await second.start(port=int(port))
        await follower.has(second.directory)
        second.directory.put(worker(NAMES[2]))
        await follower.has(second.directory)
        assert second.whole_lists == 1
    finally:
        await follower.following.close()
        await second.stop()
