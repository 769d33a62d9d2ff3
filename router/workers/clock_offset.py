"""Maps a worker's monotonic clock to the router's, from the timestamps of ordinary frames. Pure."""

from __future__ import annotations

DRIFT = 1e-4  # two hosts' clocks differ by less than 100 ppm


class ClockOffset:
    """The smallest recent (arrival − departure) is the clock difference plus the shortest travel time of a frame.

    The estimate may grow by DRIFT, to follow clocks that diverge. Mapped times are late by that shortest travel time
    (well under a millisecond on one host), never by more.
    """

    def __init__(self) -> None:
        self._least_s: float | None = None
        self._seen_s = 0.0

    def add_sample(self, sent_at_s: float, arrived_s: float) -> None:
        sample_s = arrived_s - sent_at_s
        if self._least_s is not None:
            sample_s = min(sample_s, self._least_s + DRIFT * (arrived_s - self._seen_s))
        self._least_s, self._seen_s = sample_s, arrived_s

    def local_s(self, worker_s: float) -> float | None:
        """A worker's time on the router's clock; None before the first frame."""
        return None if self._least_s is None else worker_s + self._least_s
