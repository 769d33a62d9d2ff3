"""When what happened in a handoff, on one rank of either side. Filled by the sessions, sent with their reports.

Times are seconds of one host's monotonic clock: a rank's agent and its leader share a host (they meet on a unix
socket), so the leader turns them into offsets from its own anchor. No such time ever leaves the worker. `None`: it did
not happen.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ReceiveStages(msgspec.Struct):
    """One decode rank."""

    opened_at_s: float
    """The agent took up the lease."""
    linked_at_s: float | None = None
    """The last of the links it expects had shown a good ticket."""
    first_piece_at_s: float | None = None
    """The first piece began to be written into our blocks."""
    last_piece_at_s: float | None = None
    """The last piece had been written and digested."""
    verified_at_s: float | None = None
    """Every sender had confirmed, nothing was missing, every digest was good."""

    def piece_begins(self, now_s: float) -> None:
        if self.first_piece_at_s is None:
            self.first_piece_at_s = now_s


class SendStages(msgspec.Struct):
    """One prefill rank."""

    opened_at_s: float
    """The agent took up the ticket."""
    computing_at_s: float | None = None
    """The first engine step with this prompt began (as told to the agent, and no earlier than `opened_at_s`)."""
    linked_at_s: float | None = None
    """The last of the links had accepted the ticket."""
    first_piece_at_s: float | None = None
    """The first piece was given to its link."""
    last_layer_at_s: float | None = None
    """The last range that the ticket asks for was in the pool."""
    last_ack_at_s: float | None = None
    """The last piece was acknowledged."""
    hidden_bytes: int = 0
    """Bytes that the receivers had acknowledged when the last layer was computed: what was hidden behind prefill."""

    def computing(self, now_s: float) -> None:
        if self.computing_at_s is None:
            self.computing_at_s = now_s

    def pieces_leave(self, pieces: int, now_s: float) -> None:
        if pieces and self.first_piece_at_s is None:
            self.first_piece_at_s = now_s

    def last_layer(self, acknowledged_bytes: int, now_s: float) -> None:
        if self.last_layer_at_s is None:
            self.last_layer_at_s = now_s
            self.hidden_bytes = acknowledged_bytes


def earliest(times: Iterable[float | None]) -> float | None:
    """Of several ranks, when the first began."""
    return min((time for time in times if time is not None), default=None)


def latest(times: Iterable[float | None]) -> float | None:
    """Of several ranks, when the last was done."""
    return max((time for time in times if time is not None), default=None)
