"""A worker without an engine, for tests: its leader's accounting of blocks and tickets over real agents."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from kvtransfer.causes import HandoffCause
from kvtransfer.control import (
    Attached,
    Census,
    CloseReceive,
    CloseSend,
    FromAgent,
    ReceiveClosed,
    Received,
    ReceiveFailed,
    SendClosed,
    SendFailed,
    Sent,
    TakeCensus,
)
from kvtransfer.testing.worker import FakeRank, FakeWorker

PATTERN = 0xEE
SETTLE_S = 30.0
CENSUS_S = 1.0  # until it is asked for again
LINK_S = 30.0
TicketEnd = Sent | SendFailed | SendClosed | Received | ReceiveFailed | ReceiveClosed


class TransferSide(StrEnum):
    SEND = "send"
    RECEIVE = "receive"


class Violation(AssertionError):
    """An invariant was violated."""


class LeaderTicket:
    """One ticket on one worker, as its leader sees it."""

    def __init__(self, side: TransferSide, ticket_id: str, ranks: list[FakeRank]) -> None:
        self.side = side
        self.ticket_id = ticket_id
        self.cause: str | None = None
        self.failed_s = 0.0
        self._ranks = ranks
        self._done: set[int] = set()
        self._closed: set[int] = set()
        self._ended: set[int] = set()
        self._closing = False
        self._changed = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        return self.cause is None and len(self._done) == len(self._ranks)

    @property
    def is_closed(self) -> bool:
        return len(self._closed) == len(self._ranks)

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.is_closed or self.cause is not None

    def report(self, rank: int, message: FromAgent) -> None:
        """Records a report. Raises Violation on a second end."""
        if isinstance(message, (SendClosed, ReceiveClosed)):
            if not self._closing or rank in self._closed:
                raise Violation(f"{self.side} {self.ticket_id}: rank {rank} closed without a request")
            self._closed.add(rank)
        else:
            if rank in self._ended or rank in self._closed:
                raise Violation(f"{self.side} {self.ticket_id}: a second end at rank {rank}: {message}")
            self._ended.add(rank)
            if isinstance(message, (SendFailed, ReceiveFailed)):
                self._fail(HandoffCause(message.cause).value)
            else:
                self._done.add(rank)
        self._changed.set()

    def lost(self, rank: int) -> None:
        """The rank's agent is gone, so it no longer reads or writes."""
        if rank not in self._done:
            self._fail(HandoffCause.PEER_LOST.value)
        self._ended.add(rank)
        self._closed.add(rank)
        self._changed.set()

    def _fail(self, cause: str) -> None:
        if self.cause is None:
            self.cause, self.failed_s = cause, asyncio.get_running_loop().time()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Returns when no agent reads or writes the ticket's blocks any more."""
        if not self._closing:
            self._closing = True
            message = CloseSend(self.ticket_id) if self.side is TransferSide.SEND else CloseReceive(self.ticket_id)
            for rank in self._ranks:
                if rank.rank in self._closed:
                    continue
                if rank.is_connected:
                    rank.send_as_leader(message)
                else:
                    self.lost(rank.rank)
        await self.until(lambda: self.is_closed)


class FakeLeader:
    """One worker, with its leader's accounting of blocks and tickets."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.entries: dict[str, LeaderTicket] = {}
        self.violations: list[str] = []
        self._census: dict[int, Census] = {}
        self._counted = asyncio.Event()
        self.attached = asyncio.Event()
        self.on_attached: Callable[[], None] = lambda: None
        self._over: set[str] = set()
        self._free = list(range(worker.num_blocks))
        self._room = asyncio.Event()
        for rank in worker.ranks:
            rank.pool.blocks[...] = PATTERN
            rank.listener = self._listener(rank)

    # --- blocks --------------------------------------------------------------------------------------------------

    async def lease(self, count: int) -> tuple[int, ...]:
        while len(self._free) < count:
            self._room.clear()
            await self._room.wait()
        ids, self._free = tuple(self._free[:count]), self._free[count:]
        self.check_free(ids)
        return ids

    def free(self, block_ids: tuple[int, ...]) -> None:
        for rank in self.worker.ranks:
            rank.pool.blocks[list(block_ids)] = PATTERN
        self._free.extend(block_ids)
        random.shuffle(self._free)
        self._room.set()

    def check_free(self, block_ids: tuple[int, ...]) -> None:
        for rank in self.worker.ranks:
            if not (rank.pool.blocks[list(block_ids)] == PATTERN).all():
                self.violations.append(f"{self.worker.worker_id}: a free block of {block_ids} was written")

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def check_all_free(self) -> None:
        assert sorted(self._free) == list(range(self.worker.num_blocks)), f"{self.worker.worker_id} lost blocks"
        self.check_free(tuple(self._free))

    # --- tickets -------------------------------------------------------------------------------------------------

    def open(self, side: TransferSide, ticket_id: str) -> LeaderTicket:
        entry = self.entries[ticket_id] = LeaderTicket(side, ticket_id, self.worker.ranks)
        for rank in self.worker.ranks:
            if not rank.is_connected:
                entry.lost(rank.rank)
        return entry

    def forget(self, entry: LeaderTicket) -> None:
        del self.entries[entry.ticket_id]
        self._over.add(entry.ticket_id)

    def _listener(self, rank: FakeRank) -> Callable[[FromAgent | None], None]:
        def listen(message: FromAgent | None) -> None:
            if message is None:
                self.attached.clear()
                for entry in list(self.entries.values()):
                    entry.lost(rank.rank)
            elif isinstance(message, Attached):
                self.worker.attached[rank.rank] = message
                if len(self.worker.attached) == self.worker.tp:
                    self.attached.set()
                    self.on_attached()
            elif isinstance(message, Census):
                self._census[rank.rank] = message
                self._counted.set()
            elif isinstance(message, TicketEnd):
                self._take(rank, message)

        return listen

    def _take(self, rank: FakeRank, message: TicketEnd) -> None:
        entry = self.entries.get(message.ticket_id)
        try:
            if entry is not None:
                entry.report(rank.rank, message)
            elif message.ticket_id in self._over:
                raise Violation(f"{self.worker.worker_id} rank {rank.rank}: {message} after the end")
        except Violation as violation:
            self.violations.append(str(violation))

    async def take_census(self) -> list[Census]:
        """Asks again from time to time: an agent that dies does not answer, and the next one was not asked."""
        self._census.clear()
        while missing := [rank for rank in self.worker.ranks if rank.rank not in self._census]:
            for rank in missing:
                rank.send_as_leader(TakeCensus())
            with suppress(TimeoutError):
                async with asyncio.timeout(CENSUS_S):
                    while len(self._census) < len(self.worker.ranks):
                        self._counted.clear()
                        await self._counted.wait()
        return list(self._census.values())

    async def linked(self) -> None:
        """Waits until its agents have outgoing links; the first may need a process that loads torch. Raises
        TimeoutError."""
        async with asyncio.timeout(LINK_S):
            while not all(each.links_out for each in await self.take_census()):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.02)

    async def settle(self) -> None:
        """Waits until no ticket is open on its agents. Raises TimeoutError."""
        async with asyncio.timeout(SETTLE_S):
            while await self._open_tickets():  # noqa: ASYNC110 - tickets end in other processes
                await asyncio.sleep(0.05)

    async def _open_tickets(self) -> int:
        return sum(each.sending + each.receiving + each.waiting for each in await self.take_census())

    def die(self) -> None:
        """Disconnects its ranks and its leader at once. The agents must end by themselves."""
        for rank in self.worker.ranks:
            rank.listener = None
            rank.disconnect()
            rank.disconnect_leader()
            for entry in list(self.entries.values()):
                entry.lost(rank.rank)
