"""Predictions held against measurements, on requests that the corrections were not fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibration.file import Figure, HeldOut
from planner.traces.trace import MeasuredTimes, drawn_blocks

PERCENTILES: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95}
JUDGED = ("TTFT", "TPOT")  # end to end follows from them
DRAWS = 400
SURE = (0.05, 0.95)
_LEAST_S = 1e-6  # recordings have microseconds

Columns = Mapping[str, NDArray[np.float64]]  # seconds by metric; NaN: the request has none


@dataclass(frozen=True, slots=True)
class _Errors:
    """Relative errors [metric, percentile], and their means."""

    of: NDArray[np.float64]

    @classmethod
    def between(cls, predicted: Columns, measured: Columns, index: NDArray[np.int64] | slice) -> _Errors:
        seen = (np.maximum(_percentiles(each[index]), _LEAST_S) for each in measured.values())
        found = [_percentiles(predicted[name][index]) / each - 1 for name, each in zip(measured, seen, strict=True)]
        return cls(np.array(found))

    @property
    def mean(self) -> float:
        """The larger of TTFT's and TPOT's."""
        return float(np.abs(self.of[: len(JUDGED)]).mean(axis=1).max())


def judged(
    measured: MeasuredTimes,
    before: MeasuredTimes,
    after: MeasuredTimes,
    output_tokens: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> HeldOut:
    """On the requests of `rows`, which are in order of arrival."""
    seen, first, second = (_columns(times, output_tokens, rows) for times in (measured, before, after))
    random, whole = np.random.default_rng(0), slice(None)
    errors = _Errors.between(second, seen, whole)
    drawn = [_Errors.between(second, seen, drawn_blocks(len(rows), random)) for _ in range(DRAWS)]
    low, high = np.quantile([each.of for each in drawn], SURE, axis=0)
    mean_low, mean_high = np.quantile([each.mean for each in drawn], SURE)
    figures = []
    for at, name in enumerate(seen):
        seconds = zip(*(_percentiles(each[name]).tolist() for each in (seen, first, second)), strict=True)
        for to, (percentile, (measured_s, before_s, after_s)) in enumerate(zip(PERCENTILES, seconds, strict=True)):
            figures.append(
                Figure(
                    metric=name,
                    percentile=percentile,
                    measured_s=measured_s,
                    before_s=None if np.isnan(before_s) else before_s,
                    after_s=after_s,
                    low=low[at, to],
                    high=high[at, to],
                )
            )
    error_before = _Errors.between(first, seen, whole).mean
    return HeldOut(
        requests=len(rows),
        error=errors.mean,
        low=mean_low,
        high=mean_high,
        error_before=None if np.isnan(error_before) else error_before,
        figures=tuple(figures),
    )


def _columns(times: MeasuredTimes, output_tokens: NDArray[np.int64], rows: NDArray[np.int64]) -> Columns:
    intervals = output_tokens[rows] - 1
    tpot_s = np.where(intervals > 0, times.decode_s[rows] / np.maximum(1, intervals), np.nan)
    return {"TTFT": times.ttft_s[rows], "TPOT": tpot_s, "end to end": times.e2e_s[rows]}


def _percentiles(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return np.full(len(PERCENTILES), np.nan)
    found: NDArray[np.float64] = np.quantile(known, list(PERCENTILES.values()))
    return found
