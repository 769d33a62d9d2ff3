"""Many handoffs at once, planned faults and cancellations: all end right or typed, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.testing.agent import faults_of
from kvtransfer.testing.cluster import FakeCluster
from kvtransfer.testing.leader import FakeLeader
from kvtransfer.testing.worker import FakeModel
from tandem.testing.models import FaultSettings

Soak = Callable[[int, int], int]
pytestmark = pytest.mark.soak
TRANSPORTS = [
    "mapped",
    pytest.param("tcp", marks=pytest.mark.slow),
    pytest.param("process_group", marks=pytest.mark.soak_only),
]
CONCURRENT = 8
CANCELLED = 1 << 40  # seeds of handoffs that are cancelled
# everything but the probe: what fails it refuses the link for as long as both ends live
TO_BEGIN = ("hello", "connect", "prepare", "join", "open", "accept")
TO_END = ("finish", "abort", "aborted", "fail")
LARGE = FakeModel(head_dim=1024, block_tokens=8)  # 256 KiB for a block and layer: digests follow their pieces


def faulty(settings: FaultSettings) -> dict[str, Any]:
    return {"launcher": ("kvtransfer.testing.agent", "--faults", settings.to_json())}


async def pair(
    cluster: FakeCluster,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **both: Any,
) -> tuple[FakeLeader, FakeLeader]:
    options: dict[str, Any] = {"num_blocks": 8 * CONCURRENT, "ttl_s": 5.0} | both
    return (
        await cluster.start("prefill-0", **{"connects": True, **options, **(prefill or {})}),
        await cluster.start("decode-0", **{**options, **(decode or {})}),
    )


async def cancelled(cluster: FakeCluster, number: int, after_s: float) -> None:
    await cluster.handoff("prefill-0", "decode-0", seed=CANCELLED + number, cancel_after_s=after_s)


async def run_all(works: Iterable[Coroutine[Any, Any, object]], *, at_once: int = CONCURRENT) -> None:
    """Raises what the first that failed raised."""
    waiting = iter(works)  # made one by one, when there is room

    async def run_some() -> None:
        for work in waiting:
            await work

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(run_some())


@pytest.mark.parametrize(
    "transport", ["mapped", *(pytest.param(each, marks=pytest.mark.slow) for each in ("process_group", "tcp"))]
)
@pytest.mark.slow
@pytest.mark.acceptance(13, here="10 prompts", soak="2,000")
async def test_every_16th_operation_fails_and_every_prompt_arrives_right(
    cluster: FakeCluster, soak: Soak, transport: str
) -> None:
    count = soak(2000, 10) if transport == "mapped" else soak(500, 3)
    kinds = ("fail", "delay", "duplicate", "reorder", "truncate", "flip")
    await pair(
        cluster,
        transport=transport,
        prefill=faulty(FaultSettings(seed=1, every=16, kinds=kinds, points=("push", "piece"))),
        decode=faulty(FaultSettings(seed=2, every=16, kinds=("drop", *kinds), points=("fetch", "place", "ack"))),
    )
    await run_all(cluster.request("prefill-0", "decode-0", number) for number in range(count))
    assert cluster.tally.right == count
    assert cluster.tally.failures
    await cluster.check_conservation()


@pytest.mark.parametrize("points", [TO_BEGIN, TO_END])
@pytest.mark.acceptance(16, here="10 points that fail, 15 times", soak="600 times")
async def test_what_fails_at_the_beginning_or_the_end_of_a_handoff_leaves_nothing(
    cluster: FakeCluster, soak: Soak, points: tuple[str, ...]
) -> None:
    """A third are cancelled: aborts and failures must cross links that lose them, too."""
    count = soak(600, 15)
    choose = random.Random(7)
    await pair(
        cluster,
        ttl_s=1.0,
        prefill=faulty(FaultSettings(seed=8, every=8, points=points, delay_s=0.1)),
        decode=faulty(FaultSettings(seed=9, every=8, points=points, delay_s=0.1)),
    )

    async def one(number: int) -> None:
        if number % 3 == 0:
            await cancelled(cluster, number, choose.uniform(0.0, 0.03))
        else:
            await cluster.request("prefill-0", "decode-0", number)

    await run_all(one(number) for number in range(count))
    await cluster.check_conservation()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.slow
@pytest.mark.acceptance(14, here="60 pieces", soak="1,000 (tcp: 300)")
async def test_broken_pieces_are_found_and_never_accepted(cluster: FakeCluster, soak: Soak, transport: str) -> None:
    count = soak(1000, 60) if transport == "mapped" else soak(300, 2)
    kinds = ("flip", "truncate", "duplicate", "reorder", "misaddress")
    prefill, _ = await pair(
        cluster,
        transport=transport,
        prefill=faulty(FaultSettings(seed=3, every=16, kinds=kinds, points=("piece", "digest", "memory"))),
    )
    noted = faults_of(prefill.worker.ranks[0].socket_path)
    number = 0
    while not noted.exists() or noted.read_text().count("\n") < count:
        await run_all(cluster.request("prefill-0", "decode-0", number + more) for more in range(CONCURRENT))
        number += CONCURRENT
    assert cluster.tally.failures
    await cluster.check_conservation()


@pytest.mark.parametrize("points", [("digest",), ("piece", "digest")])
@pytest.mark.slow
async def test_digests_that_follow_their_pieces_may_be_lost_late_or_wrong(
    tmp_path_factory: pytest.TempPathFactory, soak: Soak, points: tuple[str, ...]
) -> None:
    count = soak(300, 15)
    cluster = FakeCluster(tmp_path_factory.mktemp("c"), model=LARGE)
    try:
        kinds = ("fail", "drop", "delay", "duplicate", "reorder", "truncate", "flip", "misaddress")
        settings = FaultSettings(seed=11, every=9, kinds=kinds, points=points)
        prefill, _ = await pair(cluster, prefill=faulty(settings))
        noted = faults_of(prefill.worker.ranks[0].socket_path)
        number = 0
        while not noted.exists() or noted.read_text().count("\n") < count:
            await run_all(cluster.request("prefill-0", "decode-0", number + more) for more in range(CONCURRENT))
            number += CONCURRENT
        assert {line.split()[0] for line in noted.read_text().splitlines()} == {*points}
        assert cluster.tally.failures
        await cluster.check_conservation()
    finally:
        await cluster.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.slow
@pytest.mark.acceptance(15, here="150", soak="1,000")
async def test_blocks_of_cancelled_handoffs_are_neither_written_nor_read_late(
    cluster: FakeCluster, soak: Soak, transport: str
) -> None:
    """Half are cancelled and their blocks are reused at once; the pools are so small that reuse is immediate."""
    count = soak(1000, 150 if transport == "mapped" else 40)
    slow = faulty(FaultSettings(seed=4, rate=0.3, kinds=("delay",), points=("place", "fetch", "push"), delay_s=0.004))
    prefill, _ = await pair(cluster, transport=transport, num_blocks=4 * 7, ttl_s=60.0, prefill=slow, decode=slow)
    await prefill.linked()
    choose = random.Random(5)

    async def one(number: int) -> None:
        if number % 2:
            await cancelled(cluster, number, choose.uniform(0.0, 0.03))
        else:
            await cluster.request("prefill-0", "decode-0", number)

    await run_all(one(number) for number in range(2 * count))
    assert cluster.tally.right >= count
    assert cluster.tally.cancelled > count // 3
    assert cluster.tally.failed.keys() <= {"cancelled", "peer_lost"}, "the latter as when a machine stands still"
    await cluster.check_conservation()


@pytest.mark.acceptance(20, here="300 handoffs of stand-ins", soak="2,000")
async def test_a_storm_of_cancellations_leaks_nothing(cluster: FakeCluster, soak: Soak) -> None:
    count = soak(2000, 300)
    prefill, decode = await pair(cluster)
    await run_all(cluster.request("prefill-0", "decode-0", number) for number in range(2 * CONCURRENT))
    before = [resources(member) for member in (prefill, decode)]
    choose = random.Random(6)
    phases = [choose.uniform(0.0, 0.02) for _ in range(count)]
    storm = (cancelled(cluster, number, after_s) for number, after_s in enumerate(phases))
    await run_all(storm, at_once=2 * CONCURRENT)
    await cluster.check_conservation()
    for (old_fds, old_kb), (fds, kb) in zip(before, [resources(each) for each in (prefill, decode)], strict=True):
        assert fds == old_fds
        assert kb < old_kb + 8 * 1024


@pytest.mark.slow
@pytest.mark.acceptance(33, here="stand-ins, 3 s", soak="300 s")
async def test_two_directions_under_full_load_grow_nothing(cluster: FakeCluster, soak: Soak) -> None:
    load_s = soak(300, 3)
    options: dict[str, Any] = {"num_blocks": 16 * CONCURRENT, "connects": True, "ttl_s": 60.0}
    members = [await cluster.start(name, **options) for name in ("decode-0", "decode-1")]
    await asyncio.gather(*(member.linked() for member in members))
    ways = [("decode-0", "decode-1"), ("decode-1", "decode-0")]
    number = 0

    async def load(seconds: float) -> None:
        nonlocal number
        until_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until_s:
            batch = range(number, number + 64)
            number += 64
            await run_all(cluster.request(*ways[each % 2], each) for each in batch)

    await load(load_s / 5)
    before = [resources(member) for member in members]
    await load(load_s)
    for (old_fds, old_kb), (fds, kb) in zip(before, [resources(each) for each in members], strict=True):
        assert fds == old_fds
        assert kb < old_kb + 4 * 1024
    assert cluster.tally.failed.keys() <= {"peer_lost"}, "as when a machine stands still"
    await cluster.check_conservation()


def resources(member: FakeLeader) -> tuple[int, int]:
    """Descriptors and resident kB of a member's first agent."""
    folder = Path(f"/proc/{member.worker.ranks[0].process.pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return len(list((folder / "fd").iterdir())), int(status["RssAnon"].split()[0])
