"""Latency and throughput of one link, measured at its sending end. Pure."""

from __future__ import annotations

from tandem.clock import Clock

HALF_LIFE_BYTES = 256 << 20


class LinkMeter:
    """Measures latency with probes and throughput with the pieces moved.

    `latency_s` is the shortest round trip of a probe, including a digest of 4 KiB.

    `bytes_per_s` counts only time with at least one piece in flight: from before its digest is computed until it is
    acknowledged. Older bytes count less, by half per 256 MiB moved since. It is the throughput of handoffs, not of the
    wire: with few small pieces it reflects latency, and with cores shared with prefill it reflects that. None before
    the first transfer.
    """

    def __init__(self, clock: Clock) -> None:
        self.latency_s: float | None = None
        self._clock = clock
        self.in_flight_bytes = 0
        self._in_flight: dict[tuple[str, int], int] = {}  # (ticket, seq) → bytes
        self._busy_since_s = 0.0
        self._moved_bytes = 0.0  # since the link became busy
        self._sum_bytes = 0.0
        self._sum_s = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        return self._sum_bytes / self._sum_s if self._sum_bytes and self._sum_s > 0 else None

    def probed(self, round_trip_s: float) -> None:
        self.latency_s = round_trip_s if self.latency_s is None else min(self.latency_s, round_trip_s)

    def pushed(self, ticket_id: str, seq: int, size_bytes: int) -> None:
        """Call it before the piece's first byte is read."""
        if not self._in_flight:
            self._busy_since_s = self._clock.now_s()
        self._in_flight[(ticket_id, seq)] = size_bytes
        self.in_flight_bytes += size_bytes

    def acknowledged(self, ticket_id: str, seq: int) -> None:
        size_bytes = self._in_flight.pop((ticket_id, seq), 0)
        self.in_flight_bytes -= size_bytes
        self._moved_bytes += size_bytes
        self._pause_if_idle()

    def dropped(self, ticket_id: str) -> None:
        """The receiver takes no more of this ticket."""
        for key in [key for key in self._in_flight if key[0] == ticket_id]:
            self.in_flight_bytes -= self._in_flight.pop(key)
        self._pause_if_idle()

    def reconnected(self) -> None:
        """The connection was replaced: nothing is in flight, and latency is measured again."""
        self._in_flight.clear()
        self.in_flight_bytes = 0
        self._moved_bytes = 0.0
        self.latency_s = None

    def _pause_if_idle(self) -> None:
        if self._in_flight or not self._moved_bytes:
            return
        weight = 0.5 ** (self._moved_bytes / HALF_LIFE_BYTES)
        self._sum_bytes = weight * self._sum_bytes + self._moved_bytes
        self._sum_s = weight * self._sum_s + self._clock.now_s() - self._busy_since_s
        self._moved_bytes = 0.0
