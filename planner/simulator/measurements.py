"""Measurements of a run, simulated or real: a row of numbers per request, and a histogram of token intervals."""

from __future__ import annotations

import math
from copy import copy

import numpy as np
from numpy.typing import NDArray

from planner.simulator.requests import SimRequest
from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace
from router.requests import actions as act
from router.requests.facts import Facts, Placed, Requeued
from router.requests.state_machine import RequestRun
from tandem.request import RequestState

STATES = tuple(RequestState)
_LEAST_S = 1e-5
_GROWTH = math.log(1.02)  # log of the ratio between bins: percentiles are accurate to 1 %
_BINS = 1024
_ROWS = (
    "dispatched_s", "first_token_s", "last_token_s", "refused_s", "cached_tokens", "is_local", "migrations", "state",
    "_missed",
)  # fmt: skip


class IntervalHistogram:
    """Histogram of the seconds between tokens."""

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


class RunMeasurements:
    """Times are seconds of virtual time, or since the run began; NaN: it did not happen."""

    def __init__(self, trace: TrafficTrace, slo: Slo, fixed_s: float = 0.0) -> None:
        """`fixed_s`: passes before a request reaches the router's queue, and does not count as time in it. Raises
        ConfigError for objectives of a class that the trace does not have."""
        slo.check_classes(trace)
        requests = len(trace)
        self._trace, self._fixed_s = trace, fixed_s
        self._most_ttft_s, self._most_tpot_s = slo.limits(trace)
        self.misses = 0  # requests so far that missed an objective or ended unfinished
        self._missed = np.zeros(requests, np.bool_)
        self.dispatched_s = np.full(requests, np.nan)
        self.first_token_s = np.full(requests, np.nan)
        self.last_token_s = np.full(requests, np.nan)
        self.refused_s = np.full(requests, np.nan)
        self.cached_tokens = np.zeros(requests, np.int64)
        self.is_local = np.zeros(requests, np.bool_)  # a decode worker computed the prompt
        self.migrations = np.zeros(requests, np.int32)
        self.state = np.full(requests, STATES.index(RequestState.RECEIVED), np.int8)
        self.intervals = IntervalHistogram()
        self.ended = 0
        self.handoffs = 0
        self.local_prefills = 0
        self.refusals: dict[str, int] = {}

    def subscribe(self, facts: Facts) -> None:
        facts.subscribe(Placed, "measurements", self._placed)
        facts.subscribe(act.FirstToken, "measurements", self._first_token)
        facts.subscribe(Requeued, "measurements", self._requeued)
        facts.subscribe(act.End, "measurements", self._ended)

    def _placed(self, run: RequestRun, fact: Placed, now_s: float) -> None:
        if fact.placement.prefill is None:
            self.local_prefills += 1
        else:
            self.handoffs += 1
        index = _index(run)
        if not self.migrations[index]:
            self.dispatched_s[index] = now_s - self._fixed_s

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        if fact.of_answer:
            index = _index(run)
            self.first_token(index, now_s)
            self.cached_tokens[index] = run.cached_tokens
            self.is_local[index] = run.prefill is None

    def _requeued(self, run: RequestRun, fact: Requeued, now_s: float) -> None:
        if not fact.refused:
            self.migrations[_index(run)] += 1

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        if fact.error is not None:
            code = fact.error.code.value
            self.refusals[code] = self.refusals.get(code, 0) + 1
        if fact.state is RequestState.REJECTED:
            self.refused_s[_index(run)] = now_s
        self.end(_index(run), fact.state)

    def first_token(self, index: int, now_s: float) -> None:
        self.first_token_s[index] = now_s
        if now_s - self._trace.arrival_s[index] > self._most_ttft_s[index]:
            self._miss(index)

    def head(self, count: int) -> RunMeasurements:
        """The measurements of the first `count` requests, if the others were never sent."""
        part = copy(self)
        part._trace = self._trace.head(count)
        for name in _ROWS:
            setattr(part, name, getattr(self, name)[:count])
        part.misses = int(part._missed.sum())
        return part

    @property
    def finished(self) -> NDArray[np.bool_]:
        ended: NDArray[np.bool_] = self.state == STATES.index(RequestState.FINISHED)
        return ended

    def end(self, index: int, state: RequestState) -> None:
        if state is not RequestState.FINISHED or self._is_slow(index):
            self._miss(index)
        self.state[index] = STATES.index(state)
        self.ended += 1

    def _is_slow(self, index: int) -> bool:
        """Whether its tokens came more slowly than the objective; an answer of one token has no pace."""
        intervals = int(self._trace.output_tokens[index]) - 1
        if intervals < 1:
            return False
        pace_s = float(self.last_token_s[index] - self.first_token_s[index]) / intervals
        return pace_s > float(self._most_tpot_s[index])

    def _miss(self, index: int) -> None:
        if not self._missed[index]:
            self._missed[index] = True
            self.misses += 1

    def count(self, state: RequestState) -> int:
        return int((self.state == STATES.index(state)).sum())


def _index(run: RequestRun) -> int:
    assert isinstance(run.request, SimRequest)
    return run.request.index
