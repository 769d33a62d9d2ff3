"""Timestamps of a handoff's stages on one rank of either side. The sessions record them and report them.

Times are seconds of one host's monotonic clock. A rank's agent and its leader share a host, so the leader converts them
to offsets, and no such time leaves the worker. `None`: the stage did not happen.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ReceiveStages(msgspec.Struct):
    """Stages on one decode rank."""

    opened_at_s: float
    """The agent accepted the lease."""
    linked_at_s: float | None = None
    """The last expected link showed a valid ticket."""
    first_piece_at_s: float | None = None
    """The first write of a piece to our blocks started."""
    last_piece_at_s: float | None = None
    """The last piece was written and its digest computed."""
    verified_at_s: float | None = None
    """Every sender finished, no block was missing and every digest was correct."""

    def piece_begins(self, now_s: float) -> None:
        if self.first_piece_at_s is None:
            self.first_piece_at_s = now_s


class SendStages(msgspec.Struct):
    """Stages on one prefill rank."""

    opened_at_s: float
    """The agent accepted the ticket."""
    computing_at_s: float | None = None
    """The first engine step of this prompt started, as reported to the agent and not before `opened_at_s`."""
    linked_at_s: float | None = None
    """The last link accepted the ticket."""
    first_piece_at_s: float | None = None
    """The first piece was handed to its link."""
    last_layer_at_s: float | None = None
    """The last range of the ticket was in the pool."""
    last_ack_at_s: float | None = None
    """The last piece was acknowledged."""
    hidden_bytes: int = 0
    """Bytes acknowledged when the last layer was computed, which prefill hid."""

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
    """The earliest time of several ranks."""
    return min((time for time in times if time is not None), default=None)


def latest(times: Iterable[float | None]) -> float | None:
    """The latest time of several ranks."""
    return max((time for time in times if time is not None), default=None)
