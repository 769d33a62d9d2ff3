"""A worker's monotonic clock, laid on the router's by the frames that come anyway. Pure."""

from __future__ import annotations

DRIFT = 1e-4  # two hosts' clocks differ by less than 100 ppm


class ClockOffset:
    """The least (arrival − departure) seen lately is the difference of the clocks plus the shortest way a frame took:
    the best that can be known without asking. It is let grow by the drift, so that it follows clocks that run apart.
    What is laid on the router's clock is late by that shortest way (well under a millisecond on one host), never more.
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
        """The router's time of a worker's moment; None before the first frame."""
        return None if self._least_s is None else worker_s + self._least_s
