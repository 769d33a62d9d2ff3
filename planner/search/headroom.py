"""The largest load that meets a goal, and how long growing traffic takes to reach it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.search.costs import Cost

PRECISION = 0.02
LEAST_LOAD = 0.001  # requests come one by one: a goal that is missed here is missed with any load


def largest_load(meets: Callable[[float], bool], most: float) -> tuple[float, float | None] | None:
    """By bisection: the largest load that meets the goal, as a factor of the traffic's, and a larger one by at most
    `PRECISION` that does not, or None if even `most` meets it. None alone: not even `LEAST_LOAD` does.

    Both loads were tried. That no load above meets the goal is an assumption: more load is not always harder."""
    met, missed, most = 1.0, None, _rounded(most)
    if not meets(met):
        if not meets(LEAST_LOAD):
            return None
        met, missed = LEAST_LOAD, 1.0
    while missed is None:
        if met >= most:
            return met, None
        load = _rounded(min(2 * met, most))
        met, missed = (load, None) if meets(load) else (met, load)
    while missed > met * (1 + PRECISION):
        load = _rounded(math.sqrt(met * missed))
        met, missed = (load, missed) if meets(load) else (met, load)
    return met, missed


def _rounded(load: float) -> float:
    """To four digits, as it is printed: `--load` with it is the same load."""
    return float(f"{load:.4g}")


@dataclass(frozen=True, slots=True)
class Headroom:
    """`of`: "the plan", or the devices to choose from. `load`: the largest that meets the goal. `missed_at`: the next
    that was tried; None: the simulated part is too short for more. `unseen`: the share of overload that the part is too
    short to show. `growth`: of the traffic in a month; `months`: until it reaches `load`."""

    of: str
    load: float
    missed_at: float | None
    unseen: float
    growth: float | None
    months: float | None

    @classmethod
    def measured(
        cls, of: str, meets: Callable[[float], bool], span_s: float, ttft_s: float, growth: float | None
    ) -> Headroom | None:
        """`span_s`: of the simulated part. In a part as short as the TTFT objective, no wait is too long.
        None: no load meets the goal."""
        found = largest_load(meets, max(1.0, span_s / ttft_s))
        if found is None:
            return None
        load, missed_at = found
        months = None if growth is None else max(0.0, math.log(load) / math.log1p(growth))
        return cls(of, load, missed_at, load * ttft_s / span_s, growth, months)

    def lines(self, costs: Sequence[Cost], factor: float) -> Iterator[str]:
        """`costs`: of the plan; `factor`: how many times its rates are at `load`."""
        rates = ", ".join(_rates(each, factor) for each in costs if not each.is_deployed)
        yield f"largest load for {self.of}: x {self.load:g}, {rates}"
        if self.missed_at is None:
            yield "no larger load was tried: all simulated requests would arrive within one TTFT objective"
        else:
            yield f"at load x {self.missed_at:g} the goal is missed; it is assumed to be missed at any load above"
        if self.unseen > PRECISION:
            yield f"the simulated part is short: an overload of {self.unseen:.0%} may not show in it; raise --simulated"
        if self.growth is not None:
            yield self._growth_line(self.growth)

    def _growth_line(self, growth: float) -> str:
        if self.load < 1:
            return "the traffic is beyond that load already"
        least = "at least " if self.missed_at is None else ""
        return f"traffic that grows by {100 * growth:g} % a month reaches it after {least}{self.months:.1f} months"


def _rates(of: Cost, factor: float) -> str:
    requests, tokens = factor * of.requests_per_s, factor * of.tokens_per_s
    return f"{requests:.2f} requests/s and {tokens:,.0f} tokens/s in {of.what}"
