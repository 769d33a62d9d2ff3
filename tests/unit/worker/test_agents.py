from __future__ import annotations

import msgspec

from kvtransfer.control import CloseSend, LinkReport, TakeCensus
from worker.agent_watch import ASK_AFTER_S, SILENT_S
from worker.agents import Agents


class Deaf:
    """Notes what it was told, and says nothing."""

    def __init__(self, pid: int = 100) -> None:
        self.pid = pid
        self.told: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.told.append(message)


class HandClock:
    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


def report(peer: str, peer_rank: int, state: str, epoch: int = 1) -> LinkReport:
    return LinkReport(peer, epoch, peer_rank, "mapped", state, "", 0)


def test_a_worker_reaches_those_lives_whose_links_are_all_ready() -> None:
    agents = Agents([Deaf(), Deaf()], HandClock())
    agents.note(0, report("decode-0", 0, "ready"))
    agents.note(1, report("decode-0", 1, "connecting"))
    agents.note(0, report("decode-1", 0, "ready", epoch=7))
    assert agents.reach() == {("decode-1", 7)}
    agents.note(1, report("decode-0", 1, "ready"))
    assert agents.reach() == {("decode-0", 1), ("decode-1", 7)}
    agents.note(0, report("decode-0", 0, "down"))
    assert agents.reach() == {("decode-1", 7)}


def test_without_one_of_its_agents_it_reaches_nobody() -> None:
    agents = Agents([Deaf(), Deaf()], HandClock())
    agents.note(0, report("decode-0", 0, "ready"))
    agents.lost(1)
    assert agents.reach() == frozenset()


def attached_agents() -> tuple[Agents, list[Deaf], HandClock]:
    connections, clock = [Deaf(100), Deaf(101)], HandClock()
    return Agents([*connections], clock), connections, clock


def test_an_agent_that_owes_a_word_is_asked_and_then_ended() -> None:
    agents, connections, clock = attached_agents()
    agents.send(1, CloseSend("ab" * 16))
    clock.time_s += ASK_AFTER_S
    assert agents.silent() == []
    assert connections[1].told == [CloseSend("ab" * 16), TakeCensus()]
    assert connections[0].told == [], "nothing was told to it, so nothing is asked"
    clock.time_s += SILENT_S
    assert agents.silent() == [(1, 101)]
    assert agents.silent() == [], "once is enough"


def test_an_agent_that_answers_is_left_alone() -> None:
    agents, connections, clock = attached_agents()
    for _ in range(5):
        agents.broadcast(CloseSend("ab" * 16))
        clock.time_s += ASK_AFTER_S + SILENT_S - 0.1
        agents.silent()
        agents.note(0, report("decode-0", 0, "ready"))
        agents.note(1, report("decode-0", 0, "ready"))
        clock.time_s += ASK_AFTER_S + SILENT_S
        assert agents.silent() == []
    assert connections[0].told.count(TakeCensus()) == 5


def test_a_lost_agent_owes_nothing() -> None:
    agents, _, clock = attached_agents()
    agents.broadcast(CloseSend("ab" * 16))
    agents.lost(0)
    agents.send(0, CloseSend("cd" * 16))
    agents.note(1, report("decode-0", 0, "ready"))
    clock.time_s += ASK_AFTER_S + SILENT_S
    assert agents.silent() == []
