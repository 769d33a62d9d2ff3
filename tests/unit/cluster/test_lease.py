"""One controller at a time: leases grow whatever the clock does, and an ended one does nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.backends import lease as lease_module
from cluster.backends.lease import (
    LEASE_S,
    Fence,
    LatestWriter,
    Lease,
    LeaseActor,
    StaleController,
    parted,
    stamped,
)


class Clock:
    def __init__(self) -> None:
        self.unix_s = 1_000_000.0
        self.monotonic_s = 5.0

    def actor(self) -> LeaseActor:
        return LeaseActor(lambda: self.unix_s, lambda: self.monotonic_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_leases_grow_with_the_clock_and_without_it(clock: Clock) -> None:
    actor = clock.actor()
    first = actor.take("k1", 0)
    assert first == 1_000_000_000
    clock.unix_s += 1.0
    assert actor.take("k1", 0) == first + 1000
    clock.unix_s -= 3600.0
    assert actor.take("k1", 0) == first + 1001


def test_an_actor_that_was_restarted_gives_no_lease_that_members_would_refuse(clock: Clock) -> None:
    before = clock.actor().take("k1", 0)
    clock.unix_s -= 3600.0
    assert clock.actor().take("k1", before) == before + 1
    taught = clock.actor()
    taught.renew(before, "k1", "its record")  # as its holder does each second
    assert (taught.take("k1", 0), taught.kept()) == (before + 1, "its record")


def test_another_holder_waits_for_the_lease_and_then_has_it(clock: Clock) -> None:
    actor = clock.actor()
    first = actor.take("k1", 0)
    clock.monotonic_s += LEASE_S - 0.1
    assert actor.take("k2", 0) == 0
    actor.renew(first, "k1", "")
    clock.monotonic_s += LEASE_S - 0.1
    assert actor.take("k2", 0) == 0
    clock.monotonic_s += 0.2
    second = actor.take("k2", 0)
    assert second > first
    assert actor.take("k1", first) == 0
    calls: list[Callable[[], object]] = [
        lambda: actor.check(first),
        lambda: actor.renew(first, "k1", ""),
        lambda: actor.keep(first, "stale"),
    ]
    for call in calls:
        with pytest.raises(StaleController, match=f"lease {first} ended: .* holds {second}"):
            call()
    actor.keep(second, "fresh")
    assert actor.kept() == "fresh"


def test_the_next_controller_of_the_same_keeper_does_not_wait(clock: Clock) -> None:
    actor = clock.actor()
    assert 0 < actor.take("k1", 0) < actor.take("k1", 0)


def test_a_fence_refuses_a_smaller_number_only() -> None:
    fence = Fence()
    for number in (1, 1, 5):
        fence.check(number)
    with pytest.raises(StaleController):
        fence.check(4)
    assert fence.lease == 5


@pytest.mark.parametrize(("lease", "record"), [(7, '{"a": 1}'), (0, "")])
def test_the_keeper_keeps_the_lease_with_the_record(lease: int, record: str) -> None:
    assert parted(stamped(lease, record)) == (lease, record)
    assert parted("") == (0, "")


class Handle:
    """An actor's handle as Ray gives it: `handle.method.remote(...)`. `answers`: whether a call ever ends."""

    def __init__(self, actor: LeaseActor) -> None:
        self.actor = actor
        self.answers = True

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            async def remote(self, *arguments: Any) -> Any:
                if not handle.answers:
                    await asyncio.Event().wait()
                return getattr(handle.actor, name)(*arguments)

        return Method()


async def test_a_lease_that_ended_or_cannot_be_checked_lets_nothing_be_done(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle(clock.actor())
    held = await Lease.take("k1", 0, handle)
    assert held is not None
    await held.check()
    await held.renew("record")
    assert await Lease.take("k2", 0, handle) is None
    clock.monotonic_s += LEASE_S + 1
    later = await Lease.take("k2", held.number, handle)
    assert later is not None
    for call in (held.check(), held.renew("record"), held.keep("record")):
        with pytest.raises(StaleController):
            await call
    await later.check()
    monkeypatch.setattr(lease_module, "LEASE_S", 0.01)
    handle.answers = False
    with pytest.raises(TimeoutError):
        await later.check()


class Memory:
    """A store that is away for its first `outages` writes."""

    def __init__(self, text: str = "", outages: int = 0) -> None:
        self.text = text
        self.outages = outages
        self.writes: list[str] = []

    def read(self) -> str:
        return self.text

    def write(self, text: str) -> None:
        if self.outages:
            self.outages -= 1
            raise ConnectionError("the GCS is away")
        self.writes.append(text)
        self.text = text


def test_a_lost_node_of_the_actor_loses_neither_lease_nor_record(clock: Clock) -> None:
    memory = Memory()
    actor = LeaseActor(lambda: clock.unix_s, lambda: clock.monotonic_s, memory)
    lease = actor.take("k1", 0)
    actor.keep(lease, "its record")
    assert actor._writer is not None
    assert actor._writer.wait_written(10)
    clock.unix_s -= 3600.0
    another = LeaseActor(lambda: clock.unix_s, lambda: clock.monotonic_s, memory)
    assert another.kept() == "its record"
    assert another.take("k2", 0) == lease + 1
    another.forget()
    assert LeaseActor(store=memory).kept() == ""


def test_of_several_texts_the_last_is_written_also_after_an_outage() -> None:
    memory = Memory(outages=2)
    writer = LatestWriter(memory, retry_s=0.01)
    for number in range(20):
        writer.write(f"{number}")
    assert writer.wait_written(10)
    assert memory.text == "19"
    assert len(memory.writes) < 20
