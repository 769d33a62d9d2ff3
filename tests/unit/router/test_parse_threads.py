"""The threads that parse take turns by tenant."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.admission.parse_threads import ParseThreads


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


class Parsing:
    """One thread, held by a first piece of work until `open`."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.threads = ParseThreads(executor, 1)
        self.ran: list[str] = []
        self._gate = threading.Event()
        self.held = asyncio.create_task(self.threads.run("holder", 1, self._gate.wait))

    def send(self, tenant: str, cost: int = 1) -> asyncio.Task[None]:
        return asyncio.create_task(self.threads.run(tenant, cost, lambda: self.ran.append(tenant)))

    def open(self) -> None:
        self._gate.set()


async def test_tenants_share_by_what_their_work_costs(executor: ThreadPoolExecutor) -> None:
    parsing = Parsing(executor)
    await asyncio.sleep(0)
    work = [parsing.send("large", 300) for _ in range(4)] + [parsing.send("small", 100) for _ in range(6)]
    await asyncio.sleep(0)
    parsing.open()
    await asyncio.gather(*work)
    assert parsing.ran == ["large", "small", "small", "small", "large", "small", "small", "small", "large", "large"]


async def test_work_that_fails_or_is_given_up_frees_its_thread(executor: ThreadPoolExecutor) -> None:
    parsing = Parsing(executor)
    await asyncio.sleep(0)
    waiting = parsing.send("gone")
    await asyncio.sleep(0)
    waiting.cancel()
    parsing.held.cancel()
    await asyncio.wait([waiting, parsing.held])
    next_one = parsing.send("next")
    await asyncio.sleep(0)
    assert not parsing.ran, "the thread is busy although its caller is gone"
    parsing.open()
    await next_one
    assert parsing.ran == ["next"]
    with pytest.raises(ZeroDivisionError):
        await parsing.threads.run("any", 1, lambda: 1 // 0)
    assert await parsing.threads.run("any", 1, lambda: 7) == 7


async def test_callers_given_up_as_a_thread_becomes_free_leave_it_to_the_next(executor: ThreadPoolExecutor) -> None:
    """A cancelled caller goes on one turn of the event loop later: until then its place must not take the thread."""
    parsing = Parsing(executor)
    await asyncio.sleep(0)
    gone = [parsing.send("gone") for _ in range(3)]
    stays = parsing.send("stays")
    await asyncio.sleep(0)
    for each in gone:
        each.cancel()
    parsing.threads._slots.release()  # as when a parse has ended in the same turn
    await asyncio.wait(gone)
    parsing.open()
    await stays
    assert parsing.ran == ["stays"]
    await parsing.held
    assert await parsing.threads.run("any", 1, lambda: 7) == 7
    assert parsing.threads._slots.busy == -1  # because of the test's own release
    assert parsing.threads._slots.waiting == 0
