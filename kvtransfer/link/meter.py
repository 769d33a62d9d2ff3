"""What one link can do, measured from its sending end. Pure."""

from __future__ import annotations

from tandem.clock import Clock

HALF_LIFE_BYTES = 256 << 20


class LinkMeter:
    """Latency from the probes; speed from what was really moved.

    `latency_s` is the shortest of the probes' round trips: frame there, a digest of 4 KiB, frame back.

    `bytes_per_s` counts only time in which at least one piece was on its way (from before its digest is computed until
    the receiver acknowledged it, digest checked), and weighs old bytes less: by half for every 256 MiB moved since. It
    is what handoffs get, not what the wire could do: of a few small pieces it says more about latency than about
    bandwidth, and a link that shares its cores with prefill shows that. None before anything was moved.
    """

    def __init__(self, clock: Clock) -> None:
        self.latency_s: float | None = None
        self._clock = clock
        self.in_flight_bytes = 0
        self._on_their_way: dict[tuple[str, int], int] = {}  # (ticket, seq) → bytes
        self._busy_since_s = 0.0
        self._moved_bytes = 0.0  # since the link began to be busy
        self._sum_bytes = 0.0
        self._sum_s = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        return self._sum_bytes / self._sum_s if self._sum_bytes and self._sum_s > 0 else None

    def probed(self, round_trip_s: float) -> None:
        self.latency_s = round_trip_s if self.latency_s is None else min(self.latency_s, round_trip_s)

    def pushed(self, ticket_id: str, seq: int, size_bytes: int) -> None:
        """Before the piece's first byte is touched."""
        if not self._on_their_way:
            self._busy_since_s = self._clock.now_s()
        self._on_their_way[(ticket_id, seq)] = size_bytes
        self.in_flight_bytes += size_bytes

    def acknowledged(self, ticket_id: str, seq: int) -> None:
        size_bytes = self._on_their_way.pop((ticket_id, seq), 0)
        self.in_flight_bytes -= size_bytes
        self._moved_bytes += size_bytes
        self._pause_if_idle()

    def dropped(self, ticket_id: str) -> None:
        """The receiver takes nothing more of this ticket."""
        for key in [key for key in self._on_their_way if key[0] == ticket_id]:
            self.in_flight_bytes -= self._on_their_way.pop(key)
        self._pause_if_idle()

    def reconnected(self) -> None:
        """Another connection: nothing is on its way, and its latency is measured anew."""
        self._on_their_way.clear()
        self.in_flight_bytes = 0
        self._moved_bytes = 0.0
        self.latency_s = None

    def _pause_if_idle(self) -> None:
        if self._on_their_way or not self._moved_bytes:
            return
        weight = 0.5 ** (self._moved_bytes / HALF_LIFE_BYTES)
        self._sum_bytes = weight * self._sum_bytes + self._moved_bytes
        self._sum_s = weight * self._sum_s + self._clock.now_s() - self._busy_since_s
        self._moved_bytes = 0.0
