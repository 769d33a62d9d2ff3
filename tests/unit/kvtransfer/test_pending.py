"""Several operations of a link are under way on its device, and one that was started is waited for whatever happens."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import pytest

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault
from kvtransfer.transports.pending import AT_ONCE, STARTS, PendingQueue
from kvtransfer.transports.threads import MAX_THREADS, AgentThreads, LinkThread


@dataclass
class Device:
    """Ends its operations when told to, in order."""

    started: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    ends: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_waited_for: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    failing: tuple[int, ...] = ()  # end with `error`; of none named, all

    def start(self, number: int) -> Operation:
        self.started.append(number)
        return Operation(self, number)


@dataclass
class Operation:
    device: Device
    number: int

    def wait(self) -> int:
        self.device.is_waited_for.set()
        assert self.device.ends.acquire(timeout=30.0)
        if self.device.error is not None and (not self.device.failing or self.number in self.device.failing):
            raise self.device.error
        self.device.ended.append(self.number)
        return 10 * self.number


@dataclass
class Link:
    device: Device
    thread: LinkThread
    queue: PendingQueue
    hung: list[str]

    def run(self, number: int) -> asyncio.Task[int]:
        return asyncio.create_task(self.queue.run(lambda: self.device.start(number)))

    async def under_way(self, count: int) -> None:
        async with asyncio.timeout(30.0):
            while len(self.device.started) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
def link() -> Link:
    hung: list[str] = []
    thread = LinkThread("link", AgentThreads(hung.append))
    return Link(Device(), thread, PendingQueue(thread), hung)


async def test_operations_start_while_others_are_under_way_and_end_in_order(link: Link) -> None:
    tasks = [link.run(number) for number in range(AT_ONCE + 3)]
    await link.under_way(AT_ONCE)
    assert link.device.started == list(range(AT_ONCE))
    link.device.ends.release(len(tasks))
    assert await asyncio.gather(*tasks) == [10 * number for number in range(len(tasks))]
    assert link.device.started == link.device.ended == list(range(len(tasks)))


async def test_the_queue_goes_on_after_a_pause(link: Link) -> None:
    link.device.ends.release(3)
    assert [await link.run(number) for number in range(3)] == [0, 10, 20]


async def test_what_was_started_is_waited_for_after_the_link_closes_and_the_rest_is_cancelled(link: Link) -> None:
    """Else blocks would have another owner while the device writes to them."""
    tasks = [link.run(number) for number in range(AT_ONCE + 2)]
    await link.under_way(AT_ONCE)
    link.thread.close()
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks[:AT_ONCE])
    link.device.ends.release(len(tasks))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert found[:AT_ONCE] == [10 * number for number in range(AT_ONCE)]
    assert all(isinstance(each, asyncio.CancelledError) for each in found[AT_ONCE:])
    assert len(link.device.started) == AT_ONCE
    with pytest.raises(asyncio.CancelledError):
        await link.queue.run(lambda: link.device.start(99))


async def test_one_that_cannot_start_fails_alone(link: Link) -> None:
    def fails() -> Operation:
        raise HandoffFault(HandoffCause.TRANSPORT, "no memory")

    before = link.run(0)
    await link.under_way(1)
    failed, after = asyncio.create_task(link.queue.run(fails)), link.run(1)
    link.device.ends.release(2)
    with pytest.raises(HandoffFault, match="no memory"):
        await failed
    assert [await before, await after] == [0, 10]


async def test_one_that_ends_with_an_error_fails_alone_and_the_rest_is_waited_for(link: Link) -> None:
    """Else blocks would have another owner while the device writes to them."""
    tasks = [link.run(number) for number in range(3)]
    await link.under_way(3)
    link.device.error, link.device.failing = HandoffFault(HandoffCause.TRANSPORT, "no memory"), (0,)
    link.device.ends.release(1)
    with pytest.raises(HandoffFault, match="no memory"):
        await tasks[0]
    await asyncio.sleep(0.01)
    assert not tasks[1].done()
    assert not tasks[2].done()
    link.device.ends.release(2)
    assert await asyncio.gather(*tasks[1:]) == [10, 20]


@dataclass
class Ended:
    number: int

    def wait(self) -> int:
        return self.number


async def test_one_that_ends_as_it_starts_is_reported_before_the_next_does(link: Link) -> None:
    """Else acknowledgements come in batches, and the sender's window idles."""
    queue, ends = PendingQueue(link.thread, at_once=1), threading.Semaphore(0)

    def start(number: int) -> Ended:
        assert ends.acquire(timeout=30.0)
        return Ended(number)

    tasks = [asyncio.create_task(queue.run(lambda number=number: start(number))) for number in range(3)]  # type: ignore[misc]
    try:
        for number, task in enumerate(tasks):
            ends.release()
            async with asyncio.timeout(5.0):
                assert await task == number
            assert not any(later.done() for later in tasks[number + 1 :])
    finally:
        ends.release(len(tasks))


async def test_a_busy_link_lets_others_have_their_turn() -> None:
    threads = AgentThreads()
    ended = False

    def start() -> Ended:
        time.sleep(0.001)
        return Ended(0)

    async def ask(queue: PendingQueue) -> None:
        while not ended:
            await queue.run(start)

    busy = [PendingQueue(LinkThread(f"link-{number}", threads)) for number in range(MAX_THREADS)]
    asking = [asyncio.create_task(ask(queue)) for queue in busy for _ in range(2 * AT_ONCE)]
    await asyncio.sleep(0.1)
    try:
        async with asyncio.timeout(20.0):
            assert await PendingQueue(LinkThread("late", threads)).run(start) == 0
    finally:
        ended = True
        await asyncio.gather(*asking)


async def test_all_is_done_that_takes_more_than_one_turn(link: Link) -> None:
    count = 2 * STARTS + 1
    link.device.ends.release(count)
    assert await asyncio.gather(*(link.run(number) for number in range(count))) == [10 * n for n in range(count)]
    link.device.ends.release(1)
    assert await link.run(5) == 50


async def test_a_device_that_is_lost_at_a_start_fails_what_is_under_way_too(link: Link) -> None:
    def fails() -> Operation:
        raise DeviceLost("an illegal memory access was encountered")

    tasks = [link.run(number) for number in range(2)]
    await link.under_way(2)
    assert await asyncio.to_thread(link.device.is_waited_for.wait, 30.0)  # before, it would start one more
    tasks += [asyncio.create_task(link.queue.run(fails)), link.run(2)]
    await asyncio.sleep(0)
    link.device.ends.release(1)
    async with asyncio.timeout(5.0):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert found[0] == 0
    assert all(isinstance(each, DeviceLost) for each in found[1:])
    assert link.hung == ["link"]


async def test_a_lost_device_fails_all_and_is_reported(link: Link) -> None:
    tasks = [link.run(number) for number in range(AT_ONCE + 2)]
    await link.under_way(AT_ONCE)
    link.device.error = DeviceLost("an illegal memory access was encountered")
    link.device.ends.release(1)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, DeviceLost) for each in found)
    assert link.hung == ["link"]
