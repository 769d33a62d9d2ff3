"""When a link is given up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault
from kvtransfer.link.liveness import HEARTBEAT_S, LinkWatch
from kvtransfer.transports.protocol import STALL_S
from kvtransfer.transports.threads import HANG_GRACE_S, AgentThreads, LinkThread
from tandem.testing.models import FakeClock


class Watched:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.moving = False
        self.is_held_up = False
        self.watch = LinkWatch(lambda: self.moving, self.clock, is_held_up=lambda: self.is_held_up)

    def pass_time(self, seconds: float, *, has_heartbeats: bool) -> None:
        for _ in range(round(seconds / HEARTBEAT_S)):
            self.clock.advance(HEARTBEAT_S)
            if has_heartbeats:
                self.watch.heard()
            self.watch.check(HEARTBEAT_S)


def test_an_idle_link_whose_peer_beats_lives_for_ever() -> None:
    Watched().pass_time(100 * STALL_S, has_heartbeats=True)


def test_a_silent_peer_ends_the_link() -> None:
    with pytest.raises(HandoffFault, match="no heartbeat") as raised:
        Watched().pass_time(STALL_S + HEARTBEAT_S, has_heartbeats=False)
    assert raised.value.cause is HandoffCause.PEER_LOST


def test_a_peer_that_beats_and_moves_no_piece_ends_the_link() -> None:
    watched = Watched()
    watched.pass_time(10 * STALL_S, has_heartbeats=True)
    watched.moving = True
    watched.watch.moved()
    watched.pass_time(STALL_S, has_heartbeats=True)
    watched.watch.moved()
    with pytest.raises(HandoffFault, match="no piece moved"):
        watched.pass_time(STALL_S + HEARTBEAT_S, has_heartbeats=True)


def test_a_piece_that_waits_for_this_agent_ends_no_link_whose_peer_beats() -> None:
    watched = Watched()
    watched.moving = watched.is_held_up = True
    watched.pass_time(10 * STALL_S, has_heartbeats=True)
    with pytest.raises(HandoffFault):
        watched.pass_time(STALL_S + HEARTBEAT_S, has_heartbeats=False)


def test_a_piece_that_waits_for_the_peer_ends_no_link_while_the_peer_says_so() -> None:
    watched = Watched()
    watched.moving = True
    for _ in range(round(10 * STALL_S / HEARTBEAT_S)):
        watched.watch.heard(is_peer_held_up=True)
        watched.pass_time(HEARTBEAT_S, has_heartbeats=True)
    with pytest.raises(HandoffFault, match="no piece moved"):
        watched.pass_time(STALL_S + HEARTBEAT_S, has_heartbeats=True)


def test_the_time_in_which_we_were_stopped_is_not_the_peers_silence() -> None:
    watched = Watched()
    watched.clock.advance(30.0)
    watched.watch.check(30.0)
    with pytest.raises(HandoffFault):
        watched.pass_time(STALL_S + HEARTBEAT_S, has_heartbeats=False)


async def test_a_lost_device_is_reported_as_a_thread_that_hangs_is() -> None:
    hung: list[str] = []
    thread = LinkThread("link-a", AgentThreads(hung.append))

    def work() -> None:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceLost):
        await thread.run(work)
    assert hung == ["link-a"]
    thread.close()


def wait(started: threading.Event, release: threading.Event, wait_s: float) -> bool:
    started.set()
    return release.wait(wait_s)


async def test_a_thread_that_does_not_come_back_is_reported() -> None:
    hung: list[str] = []
    release = threading.Event()
    thread = LinkThread("link-a", AgentThreads(hung.append))
    thread.moves_pieces = True
    started = threading.Event()
    waiting = asyncio.create_task(thread.run(wait, started, release, 30.0))
    await asyncio.to_thread(started.wait, 30.0)
    thread.close()
    async with asyncio.timeout(30.0):
        while not hung:
            await asyncio.sleep(0.01)
    assert hung == ["link-a"]
    release.set()
    await waiting


@pytest.mark.parametrize("moves_pieces", [True, False])
async def test_a_thread_that_comes_back_or_only_connects_is_not(moves_pieces: bool) -> None:
    hung: list[str] = []
    thread = LinkThread("link-a", AgentThreads(hung.append))
    thread.moves_pieces = moves_pieces
    release = threading.Event()
    started, wait_s = threading.Event(), 0.0 if moves_pieces else HANG_GRACE_S + 0.3
    waiting = asyncio.create_task(thread.run(wait, started, release, wait_s))
    await asyncio.to_thread(started.wait, 30.0)
    thread.close()
    await asyncio.sleep(HANG_GRACE_S + 0.1)
    assert hung == []
    await waiting
