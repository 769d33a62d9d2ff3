from __future__ import annotations

import msgspec

from kvtransfer.control import CloseSend, LinkReport, LinkState, StillComputing, TakeCensus
from tandem.testing.models import FakeClock
from worker.agents import PROBE_AFTER_S, UNRESPONSIVE_S, Agents


class SilentConnection:
    """Records the messages it receives and never answers."""

    def __init__(self, pid: int = 100) -> None:
        self.pid = pid
        self.received: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.received.append(message)


def report(peer: str, peer_rank: int, state: LinkState, epoch: int = 1) -> LinkReport:
    return LinkReport(peer, epoch, peer_rank, "mapped", state, "", 0)


def test_a_worker_reaches_the_epochs_whose_links_are_all_ready() -> None:
    agents = Agents([SilentConnection(), SilentConnection()], FakeClock())
    agents.on_message(0, report("decode-0", 0, LinkState.READY))
    agents.on_message(1, report("decode-0", 1, LinkState.CONNECTING))
    agents.on_message(0, report("decode-1", 0, LinkState.READY, epoch=7))
    assert agents.reach() == {("decode-1", 7)}
    agents.on_message(1, report("decode-0", 1, LinkState.READY))
    assert agents.reach() == {("decode-0", 1), ("decode-1", 7)}
    agents.on_message(0, report("decode-0", 0, LinkState.DOWN))
    assert agents.reach() == {("decode-1", 7)}


def test_a_worker_without_one_of_its_agents_reaches_no_worker() -> None:
    agents = Agents([SilentConnection(), SilentConnection()], FakeClock())
    agents.on_message(0, report("decode-0", 0, LinkState.READY))
    agents.lost(1)
    assert agents.reach() == frozenset()


def attached_agents() -> tuple[Agents, list[SilentConnection], FakeClock]:
    connections, clock = [SilentConnection(100), SilentConnection(101)], FakeClock()
    return Agents([*connections], clock), connections, clock


def test_an_agent_that_does_not_answer_is_probed_and_then_reported() -> None:
    agents, connections, clock = attached_agents()
    agents.send(1, CloseSend("ab" * 16))
    clock.advance(PROBE_AFTER_S)
    assert agents.unresponsive() == []
    assert connections[1].received == [CloseSend("ab" * 16), TakeCensus()]
    assert connections[0].received == [], "an agent without an unanswered message gets no probe"
    clock.advance(UNRESPONSIVE_S)
    assert agents.unresponsive() == [(1, 101)]
    assert agents.unresponsive() == [], "each rank is reported once"


def test_an_agent_that_answers_is_never_reported() -> None:
    agents, connections, clock = attached_agents()
    for _ in range(5):
        agents.broadcast(CloseSend("ab" * 16))
        clock.advance(PROBE_AFTER_S + UNRESPONSIVE_S - 0.1)
        agents.unresponsive()
        agents.on_message(0, report("decode-0", 0, LinkState.READY))
        agents.on_message(1, report("decode-0", 0, LinkState.READY))
        clock.advance(PROBE_AFTER_S + UNRESPONSIVE_S)
        assert agents.unresponsive() == []
    assert connections[0].received.count(TakeCensus()) == 5


def test_an_agent_has_its_time_to_answer_after_a_step_that_took_longer() -> None:
    agents, connections, clock = attached_agents()
    agents.send(1, CloseSend("ab" * 16))
    clock.advance(PROBE_AFTER_S + UNRESPONSIVE_S)
    assert agents.unresponsive() == [], "it is only now asked"
    agents.still_computing()
    assert connections[0].received == [StillComputing()], "that is no question"
    clock.advance(UNRESPONSIVE_S)
    assert agents.unresponsive() == [(1, 101)]


def test_a_lost_agent_is_not_reported() -> None:
    agents, _, clock = attached_agents()
    agents.broadcast(CloseSend("ab" * 16))
    agents.lost(0)
    agents.send(0, CloseSend("cd" * 16))
    agents.on_message(1, report("decode-0", 0, LinkState.READY))
    clock.advance(PROBE_AFTER_S + UNRESPONSIVE_S)
    assert agents.unresponsive() == []
