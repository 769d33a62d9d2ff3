"""The threads that parse and tokenize, fair by tenant: one that sends many long bodies does not keep others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from router.admission.fair_turns import FairTurns

Result = TypeVar("Result")
PARSER_THREADS = 2  # few, as each keeps memory of the largest body that it parsed
INLINE_BYTES = 64 << 10  # longer messages are parsed in a thread
_CLASS = "parsing"


@dataclass(eq=False, slots=True)
class _Turn:
    """`tokens`: its cost, in bytes or characters."""

    tenant: str
    tokens: int
    ready: asyncio.Future[None]
    has_slot: bool = False
    priority: str = _CLASS


class FairSlots:
    """As many pieces of work run at a time as `most` says. Tenants that wait share the slots equally, by the cost of
    their work."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self.busy = 0
        self._waiting: FairTurns[_Turn] = FairTurns({_CLASS: 1.0})

    async def take(self, tenant: str, cost: int) -> None:
        """Returns when there is a slot; `release` gives it back."""
        turn = _Turn(tenant, max(1, cost), asyncio.get_running_loop().create_future())
        self._waiting.add(turn)
        self._next()
        try:
            await turn.ready
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        return self._waiting.count(_CLASS, tenant)

    def release(self) -> None:
        self.busy -= 1
        self._next()

    def _next(self) -> None:
        while self.busy < self._most() and (turn := self._waiting.head()) is not None:
            if turn.ready.cancelled():  # its caller is about to give up
                self._waiting.remove(turn)
                continue
            self._waiting.take(turn)
            self.busy += 1
            turn.has_slot = True
            turn.ready.set_result(None)

    def _give_up(self, turn: _Turn) -> None:
        if turn.has_slot:
            self.release()
        elif turn in self._waiting:
            self._waiting.remove(turn)


class ParseThreads:
    """Runs work in the threads of an executor, fairly.

    Args:
        threads: so many pieces of work run at a time, and no more wait within the executor.
    """

    def __init__(self, executor: Executor, threads: int) -> None:
        self._executor = executor
        self._slots = FairSlots(lambda: threads)

    async def parse(self, tenant: str, size: int, work: Callable[[], Result]) -> Result:
        """As `run`, of a message of `size` bytes; at once if it is short."""
        return work() if size <= INLINE_BYTES else await self.run(tenant, size, work)

    async def run(self, tenant: str, cost: int, work: Callable[[], Result]) -> Result:
        """The result of `work`, whose exceptions it raises."""
        await self._slots.take(tenant, cost)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(self._ended)  # also if the caller no longer waits: the thread is busy until then
        return await asyncio.shield(running)

    def _ended(self, running: asyncio.Future[Result]) -> None:
        if not running.cancelled():
            running.exception()  # the caller may be gone
        self._slots.release()
