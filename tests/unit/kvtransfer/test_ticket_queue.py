from __future__ import annotations

import asyncio

from kvtransfer.link.ticket_queue import TicketQueue


async def take(queue: TicketQueue[str], count: int) -> list[str]:
    async with asyncio.timeout(20.0):
        return [await queue.get() for _ in range(count)]


async def test_a_ticket_keeps_its_order_and_tickets_take_turns() -> None:
    queue = TicketQueue[str](lambda item: True)
    for number in range(4):
        queue.put("long", f"long-{number}")
    queue.put("short", "short-0")
    assert await take(queue, 5) == ["long-0", "short-0", "long-1", "long-2", "long-3"]
    assert len(queue) == 0


async def test_a_ticket_that_comes_late_waits_for_one_item_of_each_other() -> None:
    queue = TicketQueue[str](lambda item: True)
    for number in range(3):
        queue.put("a", f"a-{number}")
        queue.put("b", f"b-{number}")
    assert await take(queue, 2) == ["a-0", "b-0"]
    queue.put("c", "c-0")
    assert (await take(queue, 3)).index("c-0") == 2


async def test_what_may_not_go_holds_back_only_its_own_line() -> None:
    allowed = {"abort", "finish"}
    queue = TicketQueue[str](lambda item: item in allowed)
    queue.put("a", "piece")
    queue.put("a", "finish")
    queue.put("b", "abort")
    assert await take(queue, 1) == ["abort"]
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    allowed.add("piece")
    queue.wake()
    async with asyncio.timeout(20.0):
        assert await waiting == "piece"
    assert await take(queue, 1) == ["finish"]


async def test_get_waits_for_a_put() -> None:
    queue = TicketQueue[str](lambda item: True)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0.01)
    queue.put("a", "late")
    async with asyncio.timeout(20.0):
        assert await waiting == "late"
