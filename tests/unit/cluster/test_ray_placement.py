"""Calls of Ray's GCS that block, and a member whose actor is being replaced; without Ray."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cluster.backends.lease import Lease
from cluster.backends.ray_member import RayMember
from cluster.backends.ray_placement import GcsCalls
from cluster.keeper.members import MemberStart

START = MemberStart(run_dir="/run", files={}, processes=())


class Call:
    """Of an actor, as `actor.start.remote()`."""

    def __init__(self, called: list[str], name: str) -> None:
        self._called = called
        self._name = name

    async def remote(self, *given: object) -> None:
        self._called.append(self._name)


class Actor:
    def __init__(self, called: list[str], name: str) -> None:
        self.start, self.stop = Call(called, f"{name} starts"), Call(called, f"{name} stops")
        self.check = Call([], "")  # as that of the lease


async def test_a_gcs_that_is_away_delays_neither_the_loop_nor_the_calls_after_it() -> None:
    calls, back, made = GcsCalls(limit_s=0.2), threading.Event(), list[str]()

    def hang() -> None:
        back.wait(30)
        made.append("late")

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(TimeoutError, match=r"Ray's GCS has not answered for 0.2 s"):
        await calls.run(hang)
    with pytest.raises(TimeoutError):
        await calls.run(made.append, "never begun")
    before = ticks
    async with asyncio.timeout(20):
        while ticks < before + 5:
            await asyncio.sleep(0.01)
    assert not made, "it still hangs"
    calls._limit_s = 60.0
    back.set()
    assert await calls.run(str, 7) == "7"
    await asyncio.gather(*(calls.run(made.append, str(number)) for number in range(5)))
    assert made == ["late", "0", "1", "2", "3", "4"]
    ticking.cancel()
    calls.close()


async def test_no_epoch_starts_in_an_actor_that_is_being_replaced() -> None:
    called: list[str] = []
    lease_actor: Any = Actor(called, "lease")
    member = RayMember("decode-0.0", Lease(1, "k", lease_actor))
    member.use(Actor(called, "old"), was_started=False)
    await member.start(START)
    member.hold()
    starting = asyncio.create_task(member.start(START))
    stopping = asyncio.create_task(member.stop())
    await asyncio.sleep(0)
    member.use(Actor(called, "new"), was_started=False)  # in another thread
    await stopping
    assert called == ["old starts", "old stops"]
    member.go_on()
    await starting
    assert called == ["old starts", "old stops", "new starts"]
