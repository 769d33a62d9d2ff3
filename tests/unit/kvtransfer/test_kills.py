"""Processes that die, stop or hang in the middle of handoffs: quickly noticed, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvtransfer.agent.agent import HUNG_EXIT_CODE
from kvtransfer.control import CloseReceive, LinkReport, ReceiveClosed, SendFailed, SetPeers
from kvtransfer.testing.agent import killed_of
from kvtransfer.testing.cluster import FakeCluster
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.leader import FakeLeader, LeaderTicket
from kvtransfer.testing.worker import FakeWorker
from tandem.testing.models import FaultSettings

Soak = Callable[[int, int], int]
MakeWorker = Callable[..., FakeWorker]
pytestmark = pytest.mark.soak
WITHIN_S = 60.0  # only a hang takes longer; well below the life of tickets
STOPPED = [
    ("prefill-0", "mapped"),
    ("decode-0", "process_group"),
    ("prefill-0", "tcp"),
    pytest.param("decode-0", "mapped", marks=pytest.mark.soak_only),
    pytest.param("prefill-0", "process_group", marks=pytest.mark.soak_only),
    pytest.param("decode-0", "tcp", marks=pytest.mark.soak_only),
]
PREFILL: dict[str, Any] = {"connects": True, "num_blocks": 64, "ttl_s": 2 * WITHIN_S}
DECODE: dict[str, Any] = {"num_blocks": 64, "ttl_s": 2 * WITHIN_S}
OPTIONS = {"prefill-0": PREFILL, "prefill-1": PREFILL, "decode-0": DECODE}


class Load:
    """Requests that run all the time, some at once, until the block ends; then every one has ended right."""

    def __init__(self, cluster: FakeCluster, source: str, target: str, *, first: int = 0) -> None:
        self.right = 0
        self._cluster = cluster
        self._way = (source, target)
        self._next = first
        self._ending = False

    async def _one_after_another(self) -> None:
        while not self._ending:
            self._next += 1
            await self._cluster.request(*self._way, self._next)
            self.right += 1

    @contextlib.asynccontextmanager
    async def running(self, at_once: int = 4) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._one_after_another()) for _ in range(at_once)]
        try:
            yield
            self._ending = True
            async with asyncio.timeout(2 * WITHIN_S):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def progress(self, more: int, *, within_s: float) -> None:
        aim = self.right + more
        async with asyncio.timeout(within_s):
            while self.right < aim:
                await asyncio.sleep(0.01)


async def start(cluster: FakeCluster, *names: str, **options: Any) -> list[FakeLeader]:
    return [await cluster.start(name, **{**OPTIONS[name], **options}) for name in names]


@pytest.mark.parametrize("victim", ["prefill-0", pytest.param("decode-0", marks=pytest.mark.slow)])
@pytest.mark.slow
@pytest.mark.acceptance(2, here="3 agents of stand-ins", soak="50")
async def test_agents_killed_at_random_cost_only_retries(cluster: FakeCluster, soak: Soak, victim: str) -> None:
    members = await start(cluster, "prefill-0", "prefill-1", "decode-0")
    engine = [rank.fd for member in members for rank in member.worker.ranks]
    load, other = Load(cluster, "prefill-0", "decode-0"), Load(cluster, "prefill-1", "decode-0", first=10_000)
    choose = random.Random(1)
    async with load.running(), other.running():
        for _ in range(soak(50, 3)):
            await load.progress(3, within_s=WITHIN_S)
            await asyncio.sleep(choose.uniform(0.0, 0.02))
            affected = [entry for member in members for entry in open_with(member, cluster.members[victim])]
            cluster.kill_agent(victim)
            async with asyncio.timeout(soak(2, int(WITHIN_S))):
                while not all(entry.is_over for entry in affected):
                    await asyncio.sleep(0.005)
            if victim == "prefill-0":
                await other.progress(1, within_s=WITHIN_S)  # a survivor that shares no link with the dead
    assert engine == [rank.fd for member in members for rank in member.worker.ranks]
    assert set(cluster.tally.failed) <= {"peer_lost", "cancelled", "transport", "refused_ticket"}
    await cluster.check_conservation()


@pytest.mark.parametrize("victim", [pytest.param("prefill-0", marks=pytest.mark.slow), "decode-0"])
@pytest.mark.acceptance(4, here="3 restarts of stand-ins", soak="50")
async def test_a_worker_that_dies_and_comes_back_disturbs_no_survivor(
    cluster: FakeCluster, soak: Soak, victim: str
) -> None:
    """The same sockets every time, and a new epoch."""
    await start(cluster, "prefill-0", "decode-0")
    survivor = cluster.members["decode-0" if victim == "prefill-0" else "prefill-0"]
    pid = survivor.worker.ranks[0].process.pid
    load = Load(cluster, "prefill-0", "decode-0")
    choose = random.Random(2)
    async with load.running():
        for _ in range(soak(50, 3)):
            await load.progress(3, within_s=WITHIN_S)
            await asyncio.sleep(choose.uniform(0.0, 0.02))
            affected = list(survivor.entries.values())
            dead = cluster.members[victim]
            dead.die()
            async with asyncio.timeout(WITHIN_S):
                for rank in dead.worker.ranks:
                    assert await asyncio.to_thread(rank.process.wait) == 0
                while not all(entry.is_over for entry in affected):
                    await asyncio.sleep(0.005)
            await cluster.start(victim, **OPTIONS[victim])
    assert survivor.worker.ranks[0].process.pid == pid
    await cluster.check_conservation()


SENDER_POINTS = (
    *("hello", "connect", "probe", "send_probe", "open", "push", "piece", "digest", "memory", "finish", "abort"),
    *("Attached", "SetPeers", "LinkReport"),
    *("OpenSend", "BeginStep", "LayerDone", "Sent", "SendFailed", "CloseSend", "SendClosed"),
)
RECEIVER_POINTS = (
    *("prepare", "join", "probed", "accept", "fetch", "place", "ack", "fail", "aborted"),
    *("OpenReceive", "Received", "ReceiveFailed", "CloseReceive", "ReceiveClosed"),
)
POINTS = [("prefill-0", point) for point in SENDER_POINTS] + [("decode-0", point) for point in RECEIVER_POINTS]


@pytest.mark.parametrize(
    ("victim", "point"),
    [pytest.param(*each, marks=[] if each[1] in ("memory", "Received") else pytest.mark.slow) for each in POINTS],
)
@pytest.mark.acceptance(16, here="an agent dies at each of 35 points", soak="the same")
async def test_an_agent_that_dies_at_any_point_of_a_handoff_leaves_every_block_accounted_for(
    cluster: FakeCluster, victim: str, point: str
) -> None:
    """Some are cancelled, and some arrive broken: both have points of their own."""
    fatal = {"launcher": ("kvtransfer.testing.agent", "--killed-at", point)}
    for name in ("prefill-0", "decode-0"):
        await cluster.start(name, **OPTIONS[name] | (fatal if name == victim else {}))
    killed = killed_of(cluster.members[victim].worker.ranks[0].socket_path)
    choose = random.Random(3)

    async def one(number: int) -> None:
        if number % 3 == 0:
            await cluster.handoff("prefill-0", "decode-0", seed=number, cancel_after_s=choose.uniform(0.0, 0.02))
        else:
            await cluster.request("prefill-0", "decode-0", number)

    async with asyncio.timeout(WITHIN_S):
        numbers = itertools.count()
        while not killed.exists() or cluster.tally.right < 3:
            await asyncio.gather(*(one(next(numbers)) for _ in range(4)))
    await cluster.check_conservation()


async def test_nothing_of_an_old_epoch_is_accepted(make_worker: MakeWorker, soak: Soak) -> None:
    """Many lives on the same sockets; each time link, ticket and signature of the life before are tried."""
    prefill = make_worker("prefill-0", connects=True)
    old = make_worker("decode-0")
    await prefill.attach()
    await old.attach()
    sender = prefill.ranks[0]
    for worker_epoch in range(soak(20, 3)):
        before = old.peers()
        old.stop()
        new = make_worker("decode-0")
        await new.attach()
        sender.send_as_leader(SetPeers((*before, *new.peers())))
        new.set_peers_of(prefill)
        report = await sender.expect(LinkReport, state="refused", peer_epoch=old.epoch)
        assert "is for" in report.reason

        stale = Handoff.make(prefill, old, 27, seed=3 * worker_epoch)
        stale.open_send()
        assert (await sender.expect(SendFailed, ticket_id=stale.ticket_id)).cause == "transport"
        prefill.set_peers_of(new)
        stale = Handoff.make(prefill, old, 27, seed=3 * worker_epoch + 1)
        stale.open_send()
        assert (await sender.expect(SendFailed, ticket_id=stale.ticket_id)).cause == "stale_epoch"

        forged = Handoff.make(prefill, new, 27, seed=3 * worker_epoch + 2)
        forged.open_receive()
        forged.open_send(key=old.key)  # the new epoch's name, the old one's signature
        forged.compute(0, forged.kv.blocks)
        assert (await sender.expect(SendFailed, ticket_id=forged.ticket_id)).cause == "refused_ticket"
        assert not new.ranks[0].pool.blocks.any()
        new.ranks[0].send_as_leader(CloseReceive(forged.ticket_id))
        await new.ranks[0].expect(ReceiveClosed, ticket_id=forged.ticket_id)
        old = new


@pytest.mark.parametrize(("victim", "transport"), STOPPED)
@pytest.mark.slow
@pytest.mark.acceptance(3, here="an agent, until it is noticed", soak="27 s longer")
async def test_a_stopped_agent_holds_nobody_up_and_writes_nothing_late(
    cluster: FakeCluster, soak: Soak, victim: str, transport: str
) -> None:
    """Its peer moves on in time with another; what it does when it goes on again reaches no block of anybody else."""
    slow = FaultSettings(every=2, kinds=("delay",), points=("place", "push"), delay_s=0.01)
    faults = ("kvtransfer.testing.agent", "--faults", slow.to_json())
    prefill, decode = await start(
        cluster, "prefill-0", "decode-0", transport=transport, ttl_s=2 * WITHIN_S, launcher=faults
    )
    survivor = decode if victim == "prefill-0" else prefill
    stopped = cluster.members[victim].worker.ranks[0].process
    load = Load(cluster, "prefill-0", "decode-0")
    async with load.running(8):
        await load.progress(4, within_s=WITHIN_S)
        async with asyncio.timeout(WITHIN_S):
            while not (affected := busy(survivor)):
                await asyncio.sleep(0.001)
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(WITHIN_S):
                while not all(entry.is_over for entry in affected):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(soak(27, 0))  # its blocks are free, with the pattern that is checked at the end
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        await load.progress(8, within_s=WITHIN_S)
    await cluster.check_conservation()


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("decode-0", "fetch"),
        pytest.param("prefill-0", "push", marks=pytest.mark.slow),
        pytest.param("decode-0", "place", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
async def test_a_hung_operation_costs_its_handoff_and_its_agent_is_replaced(
    cluster: FakeCluster, victim: str, point: str
) -> None:
    hang = FaultSettings(every=1, first=10, limit=1, kinds=("hang",), points=(point,))
    launcher = ("kvtransfer.testing.agent", "--faults", hang.to_json())
    for name in ("prefill-0", "decode-0"):
        await start(cluster, name, **({"launcher": launcher} if name == victim else {}))
    hung = cluster.members[victim].worker.ranks[0]
    first = hung.process
    number = 0
    while not (failures := cluster.tally.failures):
        number += 1
        await cluster.handoff("prefill-0", "decode-0", seed=number)
    assert failures == 1
    async with asyncio.timeout(WITHIN_S):
        assert await asyncio.to_thread(first.wait) == HUNG_EXIT_CODE
        while hung.process is first or not hung.is_connected:
            await asyncio.sleep(0.01)
        await cluster.members[victim].attached.wait()
    await cluster.request("prefill-0", "decode-0", 1 << 30)
    await cluster.check_conservation()


def open_with(member: FakeLeader, victim: FakeLeader) -> list[LeaderTicket]:
    """Tickets that are open between the two."""
    if member is victim:
        return list(member.entries.values())
    return [entry for ticket_id, entry in member.entries.items() if ticket_id in victim.entries]


def busy(member: FakeLeader) -> list[LeaderTicket]:
    return [entry for entry in member.entries.values() if not entry.is_complete]
