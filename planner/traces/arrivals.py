"""Arrival processes: each draws `count` arrival times. Pure except for the random generator passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InputError

Times = NDArray[np.float64]
_STEPS = 4096  # grid points of a varying rate


class ArrivalProcess(Protocol):
    def times_s(self, count: int, random: np.random.Generator) -> Times:
        """`count` times in ascending order, none below 0."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma distributed intervals with coefficient of variation `cv`: 1 is Poisson, more is bursty."""

    requests_per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _require("rate", self.requests_per_s)
        _require("cv", self.cv)

    def times_s(self, count: int, random: np.random.Generator) -> Times:
        shape = 1 / self.cv**2
        return np.cumsum(random.gamma(shape, 1 / (shape * self.requests_per_s), count))

    def describe(self) -> str:
        kind = "Poisson" if self.cv == 1.0 else f"gamma bursts (cv {self.cv:g})"
        return f"{kind} at {self.requests_per_s:g} requests/s"


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson with a rate that changes linearly over `duration_s` and then stays constant."""

    from_per_s: float
    to_per_s: float
    duration_s: float

    def __post_init__(self) -> None:
        _require("rate", self.from_per_s)
        _require("rate", self.to_per_s)
        _require("duration", self.duration_s)

    def times_s(self, count: int, random: np.random.Generator) -> Times:
        grid_s = np.linspace(0.0, self.duration_s, _STEPS)
        rates = np.linspace(self.from_per_s, self.to_per_s, _STEPS)
        return _time_rescaled(count, random, grid_s, rates, self.to_per_s)

    def describe(self) -> str:
        return f"a ramp from {self.from_per_s:g} to {self.to_per_s:g} requests/s over {self.duration_s:g} s"


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Poisson with a sinusoidal rate: mean `requests_per_s`, period `period_s`, peak 1 + `swing` times the mean."""

    requests_per_s: float
    swing: float = 0.5
    period_s: float = 86_400.0

    def __post_init__(self) -> None:
        _require("rate", self.requests_per_s)
        _require("period", self.period_s)
        if not 0 <= self.swing <= 1:
            raise InputError(f"swing: expected a share from 0 to 1, got {self.swing:g}", field="swing")

    def times_s(self, count: int, random: np.random.Generator) -> Times:
        periods = math.ceil(count / (self.requests_per_s * self.period_s)) + 1
        grid_s = np.linspace(0.0, periods * self.period_s, _STEPS * periods)
        rates = self.requests_per_s * (1 + self.swing * np.sin(2 * np.pi * grid_s / self.period_s))
        return _time_rescaled(count, random, grid_s, rates, self.requests_per_s)

    def describe(self) -> str:
        return f"a day of {self.period_s:g} s around {self.requests_per_s:g} requests/s, peak x {1 + self.swing:g}"


def _time_rescaled(count: int, random: np.random.Generator, grid_s: Times, rates: Times, rate_after: float) -> Times:
    """Draws a Poisson process of rate 1 and maps it back through the inverse of the rate's integral."""
    expected = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(grid_s))])
    unit = np.cumsum(random.exponential(1.0, count))
    beyond = np.maximum(0.0, unit - expected[-1]) / rate_after
    times_s: Times = np.interp(unit, expected, grid_s) + beyond
    return times_s


def _require(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name}: expected more than 0, got {value:g}", field=name)
