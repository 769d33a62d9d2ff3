"""A cluster without engines, for tests: the leaders' accounting of blocks and tickets over real agents.

Every free block contains a pattern, which is checked when the block is leased again and at the end. So a late write is
detected, and a late read returns the pattern instead of the prompt's KV.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtransfer.causes import HandoffCause
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.leader import FakeLeader, LeaderTicket, TransferSide
from kvtransfer.testing.worker import FakeModel, FakeWorker

RESTART_DELAY_S = 0.2  # as for the supervisor


@dataclass(slots=True)
class Tally:
    """Number of handoffs by outcome."""

    right: int = 0
    cancelled: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        return sum(self.failed.values())


class FakeCluster:
    """Workers that may all send to each other, their leaders, and the supervisor of their agents."""

    def __init__(self, folder: Path, *, model: FakeModel | None = None, seed: int = 0) -> None:
        self.model = model or FakeModel()
        self.tally = Tally()
        self.members: dict[str, FakeLeader] = {}
        self.random = random.Random(seed)
        self._folder = folder
        self._seed = seed
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor = asyncio.create_task(self._supervise())

    async def start(self, worker_id: str, *, num_blocks: int = 64, **options: Any) -> FakeLeader:
        """Starts a worker, or its next epoch on the same sockets."""
        if worker_id in self.members:
            old = self.members.pop(worker_id)
            old.die()
            old.worker.stop()
        worker = FakeWorker(self._folder, worker_id, self.model, num_blocks=num_blocks, **options)
        member = self.members[worker_id] = FakeLeader(worker)
        member.on_attached = self.introduce
        for rank in worker.ranks:
            rank.connect()
        async with asyncio.timeout(30.0):
            await member.attached.wait()
        return member

    def introduce(self) -> None:
        """Tells every attached worker about all others."""
        there = [member.worker for member in self.members.values() if len(member.worker.attached) == member.worker.tp]
        for worker in there:
            worker.set_peers_of(*(other for other in there if other is not worker))

    async def stop(self) -> None:
        self._supervisor.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._supervisor, *self._tasks, return_exceptions=True)
        for member in self.members.values():
            for rank in member.worker.ranks:
                rank.listener = None
            member.worker.stop()

    async def _supervise(self) -> None:
        """Restarts agents, like the member's supervisor."""
        while True:
            await asyncio.sleep(0.02)
            for member in list(self.members.values()):
                for rank in member.worker.ranks:
                    if rank.process.poll() is not None and not rank.is_gone:
                        await asyncio.sleep(RESTART_DELAY_S)
                        if not rank.is_gone:
                            rank.start_agent()

    # --- handoffs ------------------------------------------------------------------------------------------------

    async def request(self, source: str, target: str, number: int, *, tokens: int = 27, attempts: int = 200) -> None:
        """Repeats handoffs until the prompt's KV is correct on the target. Each failure leads to a new ticket."""
        choose = random.Random(number)  # random, or requests could repeat a link's failure in lockstep forever
        for attempt in range(attempts):
            if await self.handoff(source, target, seed=number * attempts + attempt, tokens=tokens) is None:
                return
            await asyncio.sleep(choose.uniform(0.0, min(0.04 * (1 + attempt), 0.4)))
        raise AssertionError(f"request {number}: no attempt of {attempts} succeeded; {self.tally}")

    async def handoff(
        self, source: str, target: str, *, seed: int, tokens: int = 27, cancel_after_s: float | None = None
    ) -> str | None:
        """One ticket to its end. Returns the cause of its failure; None if the correct KV arrived."""
        sender, receiver = self.members[source], self.members[target]
        act = Handoff.make(sender.worker, receiver.worker, tokens, seed=seed, ttl_s=sender.worker.ttl_s)
        leases = {}
        for member in sorted((sender, receiver), key=lambda each: each.worker.worker_id):  # avoids deadlock
            leases[member.worker.worker_id] = await member.lease(act.kv.blocks)
        act.source_ids, act.target_ids = leases[source], leases[target]
        receiving = receiver.open(TransferSide.RECEIVE, act.ticket_id)
        sending = sender.open(TransferSide.SEND, act.ticket_id)
        if receiving.cause is None and sending.cause is None:  # otherwise an agent is restarting
            act.open_receive()
            act.open_send()
        driving = asyncio.create_task(self._drive(act, sending, cancel_after_s))
        await _first_of(receiving, sending, driving if cancel_after_s is not None else None)
        if receiving.is_complete:
            return await self._complete(act, sender, receiver, sending, receiving)
        cause = receiving.cause or sending.cause or HandoffCause.CANCELLED.value
        driving.cancel()  # the engine stops computing for this handoff
        await asyncio.gather(driving, return_exceptions=True)
        await asyncio.gather(
            self._give_back(sender, sending, act.source_ids), self._give_back(receiver, receiving, act.target_ids)
        )
        if sending.cause is None and receiving.cause is None:
            self.tally.cancelled += 1
        else:
            self.tally.failed[cause] = self.tally.failed.get(cause, 0) + 1
        return cause

    async def _drive(self, act: Handoff, sending: LeaderTicket, cancel_after_s: float | None) -> None:
        """Acts as the engine: some blocks were cached, the rest arrive in steps. Then waits, if it is to be
        cancelled."""
        choose = random.Random(act.ticket.request_id)
        first = choose.choice((0, 0, 1, 3))
        if first:
            act.export_cached(0, first)
        began_s = asyncio.get_running_loop().time()
        while first < act.kv.blocks and sending.cause is None:
            if cancel_after_s is not None and asyncio.get_running_loop().time() - began_s >= cancel_after_s:
                return
            await asyncio.sleep(choose.choice((0.0, 0.0, 0.001, 0.004)))
            end = min(act.kv.blocks, first + choose.choice((1, 2, 4)))
            act.compute(first, end)
            first = end
        if cancel_after_s is not None:
            await asyncio.sleep(max(0.0, began_s + cancel_after_s - asyncio.get_running_loop().time()))

    async def _complete(
        self, act: Handoff, sender: FakeLeader, receiver: FakeLeader, sending: LeaderTicket, receiving: LeaderTicket
    ) -> str | None:
        """Every rank verified every piece, so the bytes must be correct."""
        if not act.arrived():
            receiver.violations.append(f"{act.ticket_id}: wrong bytes were accepted")
        await sending.until(lambda: sending.is_complete or sending.cause is not None)
        if sending.is_complete:
            sender.forget(sending)
            sender.free(act.source_ids)
        else:
            await self._give_back(sender, sending, act.source_ids)
        receiver.forget(receiving)
        receiver.free(act.target_ids)
        self.tally.right += 1
        return None

    async def _give_back(self, member: FakeLeader, entry: LeaderTicket, block_ids: tuple[int, ...]) -> None:
        await entry.close()
        member.forget(entry)
        member.free(block_ids)

    # --- faults ------------------------------------------------------------------------------------------------

    def kill_agent(self, worker_id: str) -> None:
        process = self.random.choice(self.members[worker_id].worker.ranks).process
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)

    # --- checks ------------------------------------------------------------------------------------------------

    async def check_conservation(self) -> None:
        """Checks that no ticket is open, no block is leased, free blocks are unchanged and every ticket ended once."""
        for member in self.members.values():
            await member.settle()
            assert not member.entries
            member.check_all_free()
            assert not member.violations, member.violations[:5]


async def _first_of(receiving: LeaderTicket, sending: LeaderTicket, cancelled: asyncio.Task[None] | None) -> None:
    """Waits until the receiver is complete, either side failed, or the cancellation is due."""
    waits = [
        asyncio.create_task(receiving.until(lambda: receiving.is_complete or receiving.cause is not None)),
        asyncio.create_task(sending.until(lambda: sending.cause is not None)),
    ]
    everything = [*waits, *([cancelled] if cancelled else [])]
    await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
