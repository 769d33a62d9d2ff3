"""Fits corrections to measured times. Pure: it asks a function for the times that a simulation predicts.

Each factor is found where the median request takes as long as measured. The factor on prefill and the fixed time have
the least mean absolute log error of the distribution of TTFT together: its upper end tells the one, its lower end the
other. It compares no single requests, because a step that is 0.2 % shorter changes which request waits for which.
Decode and prefill alternate, because each changes what the other waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost import Corrections
from planner.traces.trace import MeasuredTimes

Predict = Callable[[float, float], MeasuredTimes]  # by the factors on prefill and decode, without a fixed time

ROUNDS = 3
SEARCHED = (0.05, 20.0)  # wider than the factors that are accepted
LARGEST_FIXED_SHARE = 0.75  # of the factor on prefill without a fixed time
WIDE, NARROW = 8, 4  # points of which the best says where to search
NEARBY = 1.15  # how far from a factor the last round looks
NEAR = 0.003  # log of a factor: both searches end there
_TRIES = 10
_LARGEST_STEP = math.log(4)
_MOST_OFF = math.log(100)  # of one request; also for one that the simulation does not finish
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Seen:
    """The requests to fit to. `output_tokens` [n]: of all requests; `rows`: those that count."""

    measured: MeasuredTimes
    output_tokens: NDArray[np.int64]
    rows: NDArray[np.int64]

    def decode_gap(self, predicted: MeasuredTimes) -> float:
        """Median log of measured over predicted TPOT."""
        rows = self.rows[self.output_tokens[self.rows] > 1]
        return float(np.median(_log_ratio(self.measured.decode_s[rows], predicted.decode_s[rows])))

    def ttft_gap(self, predicted: MeasuredTimes) -> float:
        """Median log of measured over predicted TTFT."""
        return float(np.median(_log_ratio(self.measured.ttft_s[self.rows], predicted.ttft_s[self.rows])))

    def fixed_s(self, predicted: MeasuredTimes) -> float:
        """What the measured TTFTs take more than the predicted ones: the median over both in order of size."""
        more = np.sort(self.measured.ttft_s[self.rows]) - np.sort(predicted.ttft_s[self.rows])
        return max(0.0, float(np.median(np.where(np.isnan(more), -np.inf, more))))

    def ttft_loss(self, predicted: MeasuredTimes) -> float:
        """Mean absolute log error of TTFT, both in order of size, with the fixed time that suits this prediction."""
        shifted = np.sort(predicted.ttft_s[self.rows]) + self.fixed_s(predicted)
        return float(np.abs(_log_ratio(np.sort(self.measured.ttft_s[self.rows]), shifted)).mean())


class _Search:
    def __init__(self, seen: Seen, predict: Predict) -> None:
        self._seen, self._predict = seen, predict
        self._known: dict[tuple[float, float], MeasuredTimes] = {}

    def at(self, prefill: float, decode: float) -> MeasuredTimes:
        key = (round(prefill, 6), round(decode, 6))
        if key not in self._known:
            self._known[key] = self._predict(*key)
        return self._known[key]

    def decode(self, prefill: float, start: float) -> float:
        return _root(lambda factor: self._seen.decode_gap(self.at(prefill, factor)), start)

    def prefill(self, decode: float, start: float) -> float:
        """Without a fixed time."""
        return _root(lambda factor: self._seen.ttft_gap(self.at(factor, decode)), start)

    def prefill_with_fixed(self, decode: float, low: float, high: float, points: int) -> float:
        return _least(lambda factor: self._seen.ttft_loss(self.at(factor, decode)), low, high, points)


def fit(seen: Seen, predict: Predict, *, has_fixed: bool) -> Corrections:
    """`has_fixed` False: nothing tells a fixed time from prefill, so it is 0. A factor at an end of SEARCHED was not
    found."""
    search, prefill, decode = _Search(seen, predict), 1.0, 1.0
    for number in range(ROUNDS):
        before = (prefill, decode)
        decode = search.decode(prefill, decode)
        if number == 0 or not has_fixed:
            prefill = search.prefill(decode, prefill)
        elif number == 1:
            prefill = search.prefill_with_fixed(decode, prefill * (1 - LARGEST_FIXED_SHARE), prefill, WIDE)
        else:
            prefill = search.prefill_with_fixed(decode, prefill / NEARBY, prefill * NEARBY, NARROW)
        changes = (abs(math.log(new / old)) for new, old in zip((prefill, decode), before, strict=True))
        if not has_fixed and max(changes) < NEAR:
            break
    return Corrections(prefill, decode, seen.fixed_s(search.at(prefill, decode)) if has_fixed else 0.0)


def _log_ratio(measured: NDArray[np.float64], predicted: NDArray[np.float64]) -> NDArray[np.float64]:
    least = 1e-6
    found = np.log(np.maximum(measured, least) / np.maximum(predicted, least))
    return np.clip(np.where(np.isnan(predicted), -_MOST_OFF, found), -_MOST_OFF, _MOST_OFF)


def _root(gap: Callable[[float], float], start: float) -> float:
    """The factor at which `gap`, which falls as the factor grows, is 0: a secant in logarithms within a bracket."""
    low, high = map(math.log, SEARCHED)
    x, best = math.log(start), (math.inf, math.log(start))
    last: tuple[float, float] | None = None
    for _ in range(_TRIES):
        found = gap(math.exp(x))
        best = min(best, (abs(found), x))
        if abs(found) < NEAR or high - low < NEAR:
            break
        low, high = (x, high) if found > 0 else (low, x)
        step = found
        if last is not None and x != last[0] and (slope := (found - last[1]) / (x - last[0])) < -0.2:
            step = -found / slope
        last = (x, found)
        x += min(_LARGEST_STEP, max(-_LARGEST_STEP, step))
        if not low < x < high:
            x = (low + high) / 2
    return math.exp(best[1])


def _least(loss: Callable[[float], float], low: float, high: float, points: int) -> float:
    """The factor with the least loss, ends included. A queue makes small dips, so first `points` even steps are tried,
    then a golden-section search goes on between the neighbours of the best; all in logarithms."""
    grid = np.linspace(math.log(low), math.log(high), points).tolist()
    tried = {x: loss(math.exp(x)) for x in grid}
    best = min(range(points), key=lambda at: tried[grid[at]])
    a, b = grid[max(0, best - 1)], grid[min(points - 1, best + 1)]
    inner = [b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)]
    while b - a > 4 * NEAR:
        for x in inner:
            if x not in tried:
                tried[x] = loss(math.exp(x))
        if tried[inner[0]] <= tried[inner[1]]:
            b, inner = inner[1], [inner[1] - _GOLDEN * (inner[1] - a), inner[0]]
        else:
            a, inner = inner[0], [inner[1], inner[0] + _GOLDEN * (b - inner[0])]
    return math.exp(min(tried, key=lambda x: tried[x]))
