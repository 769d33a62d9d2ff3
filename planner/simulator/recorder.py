"""What a run saw, simulated or measured: a row of numbers for each request and a histogram of token intervals."""

from __future__ import annotations

import math
from copy import copy

import numpy as np
from numpy.typing import NDArray

from planner.simulator.setup import Slo
from tandem.request import RequestState

STATES = tuple(RequestState)
_LEAST_S = 1e-5
_GROWTH = math.log(1.02)  # of a bin over the one before: percentiles are right within 1 %
_BINS = 1024
_ROWS = ("_arrival_s", "dispatched_s", "first_token_s", "last_token_s", "cached_tokens", "migrations", "state")


class IntervalHistogram:
    """Seconds between tokens."""

    def __init__(self) -> None:
        self.counts = [0] * _BINS

    def add(self, seconds: float, count: int = 1) -> None:
        at = int(math.log(seconds / _LEAST_S) / _GROWTH) if seconds > _LEAST_S else 0
        self.counts[min(at, _BINS - 1)] += count

    def percentile(self, share: float) -> float | None:
        total = sum(self.counts)
        if not total:
            return None
        at = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return _LEAST_S * math.exp((at + 0.5) * _GROWTH)


class Recorder:
    """Seconds of virtual time, or since the run began; NaN: it did not happen."""

    def __init__(self, requests: int, arrival_s: NDArray[np.float64], slo: Slo) -> None:
        self._arrival_s, self._slo = arrival_s, slo
        self.misses = 0  # requests that have missed their TTFT or were not finished, so far
        self.dispatched_s = np.full(requests, np.nan)
        self.first_token_s = np.full(requests, np.nan)
        self.last_token_s = np.full(requests, np.nan)
        self.cached_tokens = np.zeros(requests, np.int64)
        self.migrations = np.zeros(requests, np.int32)
        self.state = np.full(requests, STATES.index(RequestState.RECEIVED), np.int8)
        self.intervals = IntervalHistogram()
        self.ended = 0
        self.handoffs = 0
        self.local_prefills = 0
        self.refusals: dict[str, int] = {}

    def first_token(self, index: int, now_s: float) -> None:
        self.first_token_s[index] = now_s
        if self._slo.ttft_s is not None and now_s - self._arrival_s[index] > self._slo.ttft_s:
            self.misses += 1

    def head(self, count: int) -> Recorder:
        """Of the first `count` requests, where the others were never due."""
        part = copy(self)
        for name in _ROWS:
            setattr(part, name, getattr(self, name)[:count])
        return part

    @property
    def finished(self) -> NDArray[np.bool_]:
        ended: NDArray[np.bool_] = self.state == STATES.index(RequestState.FINISHED)
        return ended

    def end(self, index: int, state: RequestState) -> None:
        if state is not RequestState.FINISHED:
            self.misses += 1
        self.state[index] = STATES.index(state)
        self.ended += 1

    def count(self, state: RequestState) -> int:
        return int((self.state == STATES.index(state)).sum())
