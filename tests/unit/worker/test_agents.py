from __future__ import annotations

import msgspec

from kvtransfer.control import LinkReport
from worker.agents import Agents


class Deaf:
    def send(self, message: msgspec.Struct) -> None:
        """Nobody listens."""


def report(peer: str, peer_rank: int, state: str, epoch: int = 1) -> LinkReport:
    return LinkReport(peer, epoch, peer_rank, "mapped", state, "", 0)


def test_a_worker_reaches_those_lives_whose_links_are_all_ready() -> None:
    agents = Agents([Deaf(), Deaf()])
    agents.note(0, report("decode-0", 0, "ready"))
    agents.note(1, report("decode-0", 1, "connecting"))
    agents.note(0, report("decode-1", 0, "ready", epoch=7))
    assert agents.reach() == {("decode-1", 7)}
    agents.note(1, report("decode-0", 1, "ready"))
    assert agents.reach() == {("decode-0", 1), ("decode-1", 7)}
    agents.note(0, report("decode-0", 0, "down"))
    assert agents.reach() == {("decode-1", 7)}


def test_without_one_of_its_agents_it_reaches_nobody() -> None:
    agents = Agents([Deaf(), Deaf()])
    agents.note(0, report("decode-0", 0, "ready"))
    agents.lost(1)
    assert agents.reach() == frozenset()
