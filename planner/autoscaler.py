"""The autoscaling policy: how many workers of each role there should be. Pure; the caller passes the time and does it.

The pressure of a layout is the largest of: predicted TTFT and TPOT as shares of their objectives, and the share of the
decode workers' places that is needed. Beyond `headroom` something is to change: roles first, for that costs next to
nothing, then more workers. A worker less, when for long the others could have taken much more load.

What keeps it from going back and forth: a change must lower the pressure clearly, so a chain of role changes under one
load comes to an end; a worker is started again only for much more load than it was stopped at; several looks must
agree; and taking a change back under the same load doubles the waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.pool_forecast import Capability, Forecast, Layout, Load, forecasts
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.spec import ClassSpec, ModelSpec

GAIN = 0.85  # what a change leaves of the pressure, at most
STOP_MARGIN = 1.5  # a worker is stopped where the others could take so many times the load
SAME_LOAD = 2.0  # loads within this factor of each other are the same
MOST_PATIENCE = 64.0
CORRECTIONS = (0.5, 4.0)  # of a prediction, by what was measured
CORRECTION_WEIGHT = 0.2  # of the newest measurement
LEAST_MEASURED = 5  # requests
SETTLE_S = 5.0  # after a change: what is measured before that is of requests that came before it
MISSED_SHARE = 0.1  # more of the requests miss an objective: it counts as reached, whatever was predicted


class Action(StrEnum):
    """A metric label."""

    HOLD = "hold"
    CHANGE_ROLES = "change_roles"
    START = "start"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Objectives:
    """The strictest of the classes that are not batch: None is "none of them has one"."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def of(cls, classes: Sequence[ClassSpec]) -> Objectives:
        urgent = [each for each in classes if not each.batch]
        return cls(
            min((each.ttft_slo_s for each in urgent if each.ttft_slo_s is not None), default=None),
            min((each.tpot_slo_s for each in urgent if each.tpot_slo_s is not None), default=None),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """`same_width`: workers can change their role."""

    workers: tuple[int, int]
    prefill: tuple[int, int]
    decode: tuple[int, int]
    same_width: bool = True

    @classmethod
    def of(cls, spec: AutoscalerSpec, model: ModelSpec) -> Limits:
        pools = model.prefill, model.decode
        there_are = sum(pool.workers for pool in pools)
        most = there_are if spec.max_workers is None else spec.max_workers
        least = min(there_are, most) if spec.min_workers is None else spec.min_workers
        (prefill, decode) = (
            (
                min(1, pool.workers) if limits.min is None else limits.min,
                most if limits.max is None else limits.max,
            )
            for pool, limits in zip(pools, (spec.prefill, spec.decode), strict=True)
        )
        return cls((least, max(least, most)), prefill, decode, pools[0].tp == pools[1].tp)

    def allow(self, layout: Layout) -> bool:
        """As to the roles."""
        return (
            layout.decode >= 1
            and self.prefill[0] <= layout.prefill <= self.prefill[1]
            and self.decode[0] <= layout.decode <= self.decode[1]
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Of requests that are not batch, since SETTLE_S after the last change or shorter."""

    requests: int = 0  # that had their first token
    ttft_s: float | None = None  # mean
    judged: int = 0  # that ended
    missed_ttft: int = 0
    missed_tpot: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """One look at the pools of a model."""

    layout: Layout
    load: Load
    can: Capability
    measured: Measured = Measured()


@dataclass(frozen=True, slots=True)
class Decision:
    """`layout` is what there should be, `here` what there is; `reason` says why, in words."""

    action: Action
    here: Layout
    layout: Layout
    reason: str
    load: Load


@dataclass(frozen=True, slots=True)
class _Change:
    at_s: float
    here: Layout
    layout: Layout
    load: Load


@dataclass(frozen=True, slots=True)
class _Pressure:
    layout: Layout
    forecast: Forecast
    ttft: float
    tpot: float

    @property
    def value(self) -> float:
        return max(self.ttft, self.tpot, self.forecast.fill)


class Autoscaler:
    """Of one model. Call `decide` at every look, and `changed` when a decision was carried out (or, in a dry run, would
    have been); `refused` when it could not be."""

    def __init__(self, spec: AutoscalerSpec, limits: Limits, objectives: Objectives) -> None:
        self._spec, self._limits, self._objectives = spec, limits, objectives
        self._ttft_correction = 1.0
        self._wanted: tuple[Action, int, int] | None = None  # and which way
        self._times = 0
        self._idle_since_s: float | None = None
        self._last: _Change | None = None
        self._patience = 1.0

    def decide(self, view: View, now_s: float) -> Decision:
        self._correct(view)
        now = self._pressure(view, view.layout)
        action, best = self._choose(view, now)
        if action is not Action.STOP:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        if best is None:
            self._wanted = None
            return self._hold(view, self._why_not(now))
        what = f"{view.layout} to {best.layout}: {self._why(action, now, best)}"
        wanted = action, *_direction(view.layout, best.layout)
        self._times = self._times + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if self._times < self._spec.confirmations:
            return self._hold(view, f"seen {self._times} of {self._spec.confirmations} times: {what}")
        if (wait_s := self._wait_s(action, view.load, now_s)) > 0:
            return self._hold(view, f"not for {wait_s:.0f} s: {what}")
        return Decision(action, view.layout, best.layout, what, view.load)

    def changed(self, decision: Decision, now_s: float) -> None:
        last = self._last
        if last is None or not _alike(last.load, decision.load):
            self._patience = 1.0
        elif _takes_back(last, decision):
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self._last = _Change(now_s, decision.here, decision.layout, decision.load)
        self._wanted, self._idle_since_s = None, None

    def refused(self, decision: Decision, now_s: float) -> None:
        """It is asked for again only after twice the wait."""
        self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self._last = _Change(now_s, decision.here, decision.here, decision.load)
        self._wanted, self._idle_since_s = None, None

    # ---- what to do

    def _choose(self, view: View, now: _Pressure) -> tuple[Action, _Pressure | None]:
        headroom, limits = self._spec.headroom, self._limits
        if now.value > headroom:
            enough = now.value * GAIN
            roles = self._best(view, self._other_roles(view.layout))
            if roles is not None and roles.value <= enough:
                return Action.CHANGE_ROLES, roles
            more = self._enough_more(view)
            if more is not None and more.value < now.value:
                return Action.START, more
        elif view.layout.workers > limits.workers[0]:
            more_load = replace(view, load=view.load.times(STOP_MARGIN))
            fewer = self._best(more_load, self._smaller(view.layout))
            if fewer is not None and fewer.value <= headroom:
                return Action.STOP, fewer
        return Action.HOLD, None

    def _enough_more(self, view: View) -> _Pressure | None:
        """With as few workers more as are enough; with as many as there may be when none are."""
        most, found = min(self._limits.workers[1], _most(view.layout)), None
        for workers in range(view.layout.workers + 1, most + 1):
            found = self._best(view, self._larger(view.layout, workers))
            if found is not None and found.value <= self._spec.headroom:
                break
        return found

    def _other_roles(self, here: Layout) -> Iterator[Layout]:
        if self._limits.same_width:
            step = max(1, here.workers // 4)
            for prefill in range(here.prefill - step, here.prefill + step + 1):
                if prefill != here.prefill:
                    yield Layout(prefill, here.workers - prefill)

    def _larger(self, here: Layout, workers: int) -> Iterator[Layout]:
        for prefill in range(here.prefill, here.prefill + workers - here.workers + 1):
            yield Layout(prefill, workers - prefill)

    def _smaller(self, here: Layout) -> Iterator[Layout]:
        yield Layout(here.prefill - 1, here.decode)
        yield Layout(here.prefill, here.decode - 1)

    def _best(self, view: View, layouts: Iterable[Layout]) -> _Pressure | None:
        """The least pressure; among equals the fewest changes."""
        found = [self._pressure(view, each) for each in layouts if min(each) >= 0 and self._limits.allow(each)]
        return min(found, key=lambda each: (each.value, abs(each.layout.prefill - view.layout.prefill)), default=None)

    # ---- when

    def _wait_s(self, action: Action, load: Load, now_s: float) -> float:
        last = self._last
        patience = self._patience if last is not None and _alike(last.load, load) else 1.0
        if action is Action.STOP:
            since_s = now_s if self._idle_since_s is None else self._idle_since_s
            return since_s + patience * self._spec.stop_after_s - now_s
        if last is None:
            return 0.0
        cooldown_s = self._spec.role_cooldown_s if action is Action.CHANGE_ROLES else self._spec.start_cooldown_s
        return last.at_s + patience * cooldown_s - now_s

    # ---- what is predicted

    def _pressure(self, view: View, layout: Layout) -> _Pressure:
        found, load = self._forecast(view, layout), view.load
        asks = load.requests_per_s > 0 or load.queued_tokens > 0
        answers = load.answer_tokens_per_s > 0 or load.decoding_requests > 0
        ttft, tpot = self._shares(found)
        more_ttft, more_tpot = self._missed(view)
        return _Pressure(layout, found, asks * ttft * more_ttft, answers * tpot * more_tpot)

    def _forecast(self, view: View, layout: Layout) -> Forecast:
        """With as many prompts computed on decode workers as is best: so the router does it."""
        return min(forecasts(layout, view.load, view.can), key=lambda each: max(*self._shares(each), each.fill))

    def _shares(self, found: Forecast) -> tuple[float, float]:
        """Of the objectives."""
        ttft_s, tpot_s = self._objectives.ttft_s, self._objectives.tpot_s
        return (
            0.0 if ttft_s is None else self._ttft_correction * found.ttft_tail_s / ttft_s,
            0.0 if tpot_s is None else found.tpot_s / tpot_s,
        )

    def _missed(self, view: View) -> tuple[float, float]:
        """By what TTFT and TPOT are taken to be more than predicted: an objective that many requests missed counts as
        reached. Where predictions are off by more than that, it is no matter of how many workers there are."""
        measured = view.measured
        if measured.judged < LEAST_MEASURED:
            return 1.0, 1.0
        ttft, tpot = self._shares(self._forecast(view, view.layout))
        many = MISSED_SHARE * measured.judged
        return (
            _to_reach_one(ttft) if measured.missed_ttft > many else 1.0,
            _to_reach_one(tpot) if measured.missed_tpot > many else 1.0,
        )

    def _correct(self, view: View) -> None:
        measured = view.measured
        if measured.ttft_s is None or measured.requests < LEAST_MEASURED:
            return
        predicted_s = self._forecast(view, view.layout).ttft_s
        if predicted_s > 0:
            least, most = CORRECTIONS
            seen = max(least, min(most, measured.ttft_s / predicted_s))
            self._ttft_correction += CORRECTION_WEIGHT * (seen - self._ttft_correction)

    # ---- in words

    def _hold(self, view: View, reason: str) -> Decision:
        return Decision(Action.HOLD, view.layout, view.layout, reason, view.load)

    def _why(self, action: Action, now: _Pressure, best: _Pressure) -> str:
        if action is Action.STOP:
            return f"at {STOP_MARGIN:g} times the load and without it {self._words(best)}"
        return f"{self._words(now)}; then {self._words(best)}"

    def _why_not(self, now: _Pressure) -> str:
        if now.value <= self._spec.headroom:
            return f"within the objectives: {self._words(now)}"
        return f"nothing within the limits would be clearly better: {self._words(now)}"

    def _words(self, pressure: _Pressure) -> str:
        found, parts = pressure.forecast, []
        if self._objectives.ttft_s is not None:
            parts.append(f"TTFT {100 * pressure.ttft:.0f} % of {self._objectives.ttft_s:g} s")
        if self._objectives.tpot_s is not None:
            parts.append(f"TPOT {100 * pressure.tpot:.0f} % of {1000 * self._objectives.tpot_s:g} ms")
        return f"{', '.join(parts)}, decode places {100 * found.fill:.0f} %"


def _to_reach_one(share: float) -> float:
    return min(CORRECTIONS[1], max(1.0, 1 / share)) if share > 0 else 1.0


def _direction(here: Layout, layout: Layout) -> tuple[int, int]:
    """Of each role: 1 more, -1 fewer."""
    changes = layout.prefill - here.prefill, layout.decode - here.decode
    return (changes[0] > 0) - (changes[0] < 0), (changes[1] > 0) - (changes[1] < 0)


def _most(here: Layout) -> int:
    """Workers after one change."""
    return here.workers + max(1, here.workers // 4)


def _alike(one: Load, other: Load) -> bool:
    pairs = (
        (one.prefill_tokens_per_s, other.prefill_tokens_per_s),
        (one.answer_tokens_per_s, other.answer_tokens_per_s),
    )
    return all(max(pair) <= SAME_LOAD * min(pair) or max(pair) == 0 for pair in pairs)


def _takes_back(last: _Change, decision: Decision) -> bool:
    """A role's number of workers goes the other way."""
    before, after = _direction(last.here, last.layout), _direction(decision.here, decision.layout)
    return any(one * other < 0 for one, other in zip(before, after, strict=True))
