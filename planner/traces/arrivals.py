"""Arrival processes: each draws `count` arrival times. Pure except for the random generator passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InputError

Times = NDArray[np.float64]
_STEPS = 4096  # grid points of a varying rate
_LEAST, _MOST = 1e-6, 1e9  # of rates and times
_MOST_CV = 100.0


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
        _require("cv", self.cv, _MOST_CV)

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
        expected, unit = _integral(rates, grid_s), _unit_times(count, random)
        beyond = np.maximum(0.0, unit - expected[-1]) / self.to_per_s
        times_s: Times = np.interp(unit, expected, grid_s) + beyond
        return times_s

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
        grid_s = np.linspace(0.0, self.period_s, _STEPS)
        rates = self.requests_per_s * (1 + self.swing * np.sin(2 * np.pi * grid_s / self.period_s))
        expected = _integral(rates, grid_s)
        periods, rest = np.divmod(_unit_times(count, random), expected[-1])
        times_s: Times = periods * self.period_s + np.interp(rest, expected, grid_s)
        return times_s

    def describe(self) -> str:
        return f"a day of {self.period_s:g} s around {self.requests_per_s:g} requests/s, peak x {1 + self.swing:g}"


# Time rescaling: the inverse of a rate's integral maps a Poisson process of rate 1 to one of that rate.


def _unit_times(count: int, random: np.random.Generator) -> Times:
    return np.cumsum(random.exponential(1.0, count))


def _integral(rates: Times, grid_s: Times) -> Times:
    """The requests that arrive until each time of the grid, on average."""
    return np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(grid_s))])


def _require(name: str, value: float, most: float = _MOST) -> None:
    if not _LEAST <= value <= most:
        raise InputError(f"{name}: expected {_LEAST:g} to {most:g}, got {value:g}", field=name)
