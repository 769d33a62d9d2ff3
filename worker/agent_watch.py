"""Finds the transfer agent that is there and says nothing: stopped, or hung where its own watch does not reach. Pure.

Who was told something and has said nothing for `ASK_AFTER_S` is asked; who has not even answered that within `SILENT_S`
is given up. An agent that was told nothing is asked nothing: an idle worker is quiet.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.clock import Clock

ASK_AFTER_S = 1.0
SILENT_S = 10.0  # an agent that loads torch for its first process group may be busy for seconds


@dataclass(slots=True)
class _Waiting:
    since_s: float
    is_asked: bool = False


class AgentWatch:
    """Agents are named by their ranks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}

    def told(self, rank: int) -> None:
        if rank not in self._waiting:
            self._waiting[rank] = _Waiting(self._clock.now_s())

    def heard(self, rank: int) -> None:
        """It lives; or its connection ended, and it is told nothing until there is another."""
        self._waiting.pop(rank, None)

    def to_ask(self) -> list[int]:
        """Ranks to send a question that has an answer. Each is named once."""
        found = [rank for rank, each in self._waiting.items() if not each.is_asked and self._age_s(each) >= ASK_AFTER_S]
        for rank in found:
            self._waiting[rank].is_asked = True
        return found

    def silent(self) -> list[int]:
        """Ranks whose agents are to be ended. Each is named once."""
        found = [rank for rank, each in self._waiting.items() if self._age_s(each) >= ASK_AFTER_S + SILENT_S]
        for rank in found:
            del self._waiting[rank]
        return found

    def _age_s(self, waiting: _Waiting) -> float:
        return self._clock.now_s() - waiting.since_s
