"""The threads that an agent's links share: in order within a link, at the same time between links, and bounded."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from kvtransfer.causes import HandoffFault
from kvtransfer.transports.threads import MAX_ABANDONED, MAX_THREADS, AgentThreads, LinkThread


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not is_so():
            await asyncio.sleep(0.005)


def links(count: int) -> tuple[AgentThreads, list[LinkThread], list[str]]:
    hung: list[str] = []
    threads = AgentThreads(hung.append)
    return threads, [LinkThread(f"link-{number}", threads) for number in range(count)], hung


async def test_operations_of_a_link_run_in_order() -> None:
    _, (link,), _ = links(1)
    order: list[int] = []

    def work(number: int) -> int:
        time.sleep(0.002 * (3 - number % 3))
        order.append(number)
        return number

    found = await asyncio.gather(*(link.run(work, number) for number in range(30)))
    assert order == found == list(range(30))


async def test_links_work_at_the_same_time_but_never_in_more_threads_than_allowed() -> None:
    _, many, _ = links(3 * MAX_THREADS)
    lock = threading.Lock()
    running, most = 0, 0
    together = threading.Barrier(MAX_THREADS, timeout=30.0)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1

    await asyncio.gather(*(link.run(work) for link in many))
    assert most == MAX_THREADS


async def test_errors_reach_the_caller_and_the_next_operation_runs() -> None:
    _, (link,), _ = links(1)

    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await link.run(fail)
    assert await link.run(lambda: 7) == 7


async def test_queued_operations_of_a_closed_link_do_not_run() -> None:
    _, (link,), _ = links(1)
    started, release, ran = threading.Event(), threading.Event(), threading.Event()

    def work() -> bool:
        started.set()
        return release.wait(30.0)

    first = asyncio.create_task(link.run(work))
    second = asyncio.create_task(link.run(ran.set))
    await until(started.is_set)
    link.close()
    release.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second
    with pytest.raises(asyncio.CancelledError):
        await link.run(ran.set)
    assert not ran.is_set()


async def test_a_hung_wait_ends_its_link_and_no_other() -> None:
    _, (first, *others), hung = links(1 + 2 * MAX_THREADS)
    started, release, ended = threading.Event(), threading.Event(), threading.Event()
    touched: list[str] = []

    def work() -> None:
        try:
            with first.waiting():
                started.set()
                release.wait(30.0)
            touched.append("the pool")
        finally:
            ended.set()

    first.moves_pieces = True
    waiting = asyncio.create_task(first.run(work))
    await until(started.is_set)
    first.close()
    with pytest.raises(HandoffFault, match="hangs after the link was closed"):
        await waiting
    assert await asyncio.gather(*(link.run(lambda: 1) for link in others)) == [1] * len(others)
    release.set()
    await until(ended.is_set)
    assert not touched, "an abandoned operation touches nothing"
    assert not hung


async def test_too_many_hung_waits_end_the_process() -> None:
    _, many, hung = links(MAX_ABANDONED + 1)
    all_started, release = threading.Barrier(len(many) + 1, timeout=30.0), threading.Event()

    def work(link: LinkThread) -> None:
        with link.waiting():
            all_started.wait()
            release.wait(30.0)

    waiting = [asyncio.create_task(link.run(work, link)) for link in many]
    await asyncio.to_thread(all_started.wait)
    for link in many:
        link.moves_pieces = True
        link.close()
    await until(lambda: bool(hung))
    assert len(hung) == 1
    release.set()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_operations_that_wait_for_peers_leave_the_threads_to_others() -> None:
    _, many, hung = links(2 * MAX_THREADS)
    stuck, free = many[: MAX_THREADS + 3], many[MAX_THREADS + 3 :]
    all_wait, release = threading.Barrier(len(stuck) + 1, timeout=30.0), threading.Event()

    def wait(link: LinkThread) -> None:
        with link.waiting():
            all_wait.wait()
            release.wait(30.0)

    waiting = [asyncio.create_task(link.run(wait, link)) for link in stuck]
    await asyncio.to_thread(all_wait.wait)
    assert await asyncio.gather(*(link.run(lambda: 1) for link in free)) == [1] * len(free)
    release.set()
    await asyncio.gather(*waiting)
    assert not hung
