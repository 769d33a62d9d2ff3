"""The autoscaling policy: how many workers each role should have. Pure: the caller passes the time and acts.

The pressure of given pool sizes is the largest of three ratios: predicted TTFT over its objective, predicted TPOT over
its objective, and needed over available places on decode workers. Above `headroom` the policy first changes roles,
which costs almost nothing, then starts workers. It stops a worker that the others could have replaced for a long time,
even at a much higher load.

Five rules prevent oscillation. A change must lower the pressure clearly, so a chain of role changes under one load
ends. A worker is started again only at a much higher load than the one at which it was stopped. Several consecutive
observations must agree. Reverting a change under the same load doubles the waits. Sizes that were left under the same
load count as no better than they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.pool_forecast import Capability, Forecast, ModelLoad, PoolSizes, forecasts
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.model import ModelSpec
from tandem.config.router import ClassSpec

GAIN = 0.85  # a change must reduce the pressure to at most this share
STOP_MARGIN = 1.5  # a worker is stopped if the others could serve this multiple of the load
SAME_LOAD = 2.0  # loads within this factor of each other are the same
MAX_BACKOFF = 64.0
REMEMBER_S = 3600.0  # how sizes did that were left
CORRECTIONS = (0.5, 4.0)  # bounds of measured over predicted TTFT
CORRECTION_WEIGHT = 0.2  # of the newest measurement in the moving average
MIN_MEASURED = 5  # requests
SETTLE_S = 5.0  # after a change; earlier measurements are of requests that arrived before it
MISSED_SHARE = 0.1  # if more requests miss an objective, its pressure is at least 1, whatever was predicted


class ScalingAction(StrEnum):
    """A metric label."""

    HOLD = "hold"
    CHANGE_ROLES = "change_roles"
    START = "start"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Objectives:
    """The strictest objectives of all classes that are not batch. None: no such class has one."""

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
class ScalingLimits:
    """Minimum and maximum numbers of workers, in total and per role. `can_change_roles`: see `ModelSpec`."""

    workers: tuple[int, int]
    prefill: tuple[int, int]
    decode: tuple[int, int]
    can_change_roles: bool = True

    @classmethod
    def of(cls, spec: AutoscalerSpec, model: ModelSpec) -> ScalingLimits:
        pools = model.prefill, model.decode
        present = sum(pool.workers for pool in pools)
        most = present if spec.max_workers is None else spec.max_workers
        least = min(present, most) if spec.min_workers is None else spec.min_workers
        (prefill, decode) = (
            (
                min(1, pool.workers) if limits.min is None else limits.min,
                most if limits.max is None else limits.max,
            )
            for pool, limits in zip(pools, (spec.prefill, spec.decode), strict=True)
        )
        if model.no_prefill_workers is not None:
            prefill = 0, 0
        return cls((least, max(least, most)), prefill, decode, model.can_change_roles)

    def allow(self, sizes: PoolSizes) -> bool:
        """Whether the limits of both roles hold. The total is not checked."""
        return (
            sizes.decode >= 1
            and self.prefill[0] <= sizes.prefill <= self.prefill[1]
            and self.decode[0] <= sizes.decode <= self.decode[1]
        )


@dataclass(frozen=True, slots=True)
class MeasuredRequests:
    """Measurements of requests that are not batch, none from before the last change plus SETTLE_S."""

    requests: int = 0  # with a first token in that time
    ttft_s: float | None = None  # mean
    judged: int = 0  # ended in that time
    missed_ttft: int = 0
    missed_tpot: int = 0


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """The pools of a model at one time."""

    sizes: PoolSizes
    load: ModelLoad
    capability: Capability
    measured: MeasuredRequests = MeasuredRequests()


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The pool sizes to reach, and the reason as a sentence for operators."""

    action: ScalingAction
    current: PoolSizes
    target: PoolSizes
    reason: str
    load: ModelLoad


@dataclass(frozen=True, slots=True)
class _Change:
    at_s: float
    before: PoolSizes
    after: PoolSizes
    load: ModelLoad


@dataclass(frozen=True, slots=True)
class _Left:
    """Sizes that were left. A prediction may be better than what was seen there."""

    at_s: float
    pressure: float
    load: ModelLoad


@dataclass(frozen=True, slots=True)
class _Pressure:
    """`seen`: what it was, if these sizes were left under the same load."""

    sizes: PoolSizes
    forecast: Forecast
    ttft: float
    tpot: float
    seen: float = 0.0

    @property
    def value(self) -> float:
        return max(self.ttft, self.tpot, self.forecast.fill, self.seen)


class Autoscaler:
    """The policy of one model. Call `decide` with every observation, `changed` after carrying out a decision (or where
    a dry run would have), and `refused` if it could not be carried out."""

    def __init__(self, spec: AutoscalerSpec, limits: ScalingLimits, objectives: Objectives) -> None:
        self._spec, self._limits, self._objectives = spec, limits, objectives
        self._ttft_correction = 1.0
        self._wanted: tuple[ScalingAction, int, int] | None = None  # with the direction of each role
        self._confirmed = 0
        self._idle_since_s: float | None = None
        self._last: _Change | None = None
        self._left: dict[PoolSizes, _Left] = {}
        self._now = 0.0  # pressure at the last observation
        self._backoff = 1.0

    def decide(self, seen: PoolObservation, now_s: float) -> ScalingDecision:
        seen = replace(seen, capability=seen.capability.without_prompts(seen.sizes, seen.load))
        self._correct(seen)
        self._left = {
            sizes: left
            for sizes, left in self._left.items()
            if now_s < left.at_s + REMEMBER_S and _is_same_load(left.load, seen.load)
        }
        now = self._pressure(seen, seen.sizes)
        self._now = now.value
        action, best = self._choose(seen, now)
        if action is not ScalingAction.STOP:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        if best is None:
            self._wanted = None
            return self._hold(seen, self._why_not(now))
        what = f"{seen.sizes} to {best.sizes}: {self._why(action, now, best)}"
        wanted = action, *_direction(seen.sizes, best.sizes)
        self._confirmed = self._confirmed + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if self._confirmed < self._spec.confirmations:
            return self._hold(seen, f"confirmed {self._confirmed} of {self._spec.confirmations} times: {what}")
        if (wait_s := self._wait_s(action, seen.load, now_s)) > 0:
            return self._hold(seen, f"waiting {wait_s:.0f} s: {what}")
        return ScalingDecision(action, seen.sizes, best.sizes, what, seen.load)

    def changed(self, decision: ScalingDecision, now_s: float) -> None:
        last = self._last
        if last is None or not _is_same_load(last.load, decision.load):
            self._backoff = 1.0
        elif _reverts(last, decision):
            self._backoff = min(MAX_BACKOFF, 2 * self._backoff)
        self._last = _Change(now_s, decision.current, decision.target, decision.load)
        if decision.action is ScalingAction.CHANGE_ROLES:
            self._left[decision.current] = _Left(now_s, self._now, decision.load)
        self._wanted, self._idle_since_s = None, None

    def refused(self, decision: ScalingDecision, now_s: float) -> None:
        """Doubles the wait before the next attempt."""
        self._backoff = min(MAX_BACKOFF, 2 * self._backoff)
        self._last = _Change(now_s, decision.current, decision.current, decision.load)
        self._wanted, self._idle_since_s = None, None

    # ---- the action

    def _choose(self, seen: PoolObservation, now: _Pressure) -> tuple[ScalingAction, _Pressure | None]:
        headroom, limits = self._spec.headroom, self._limits
        if now.value > headroom:
            limit = now.value * GAIN
            workers = seen.sizes.workers
            for most in (max(1, workers // 4), workers):  # a better split may lie behind a worse one
                roles = self._best(seen, self._with_other_roles(seen.sizes, most))
                if roles is not None and roles.value <= limit:
                    return ScalingAction.CHANGE_ROLES, roles
            more = self._with_more_workers(seen)
            if more is not None and more.value < now.value:
                return ScalingAction.START, more
        elif seen.sizes.workers > limits.workers[0]:
            more_load = replace(seen, load=seen.load.times(STOP_MARGIN))
            fewer = self._best(more_load, self._smaller(seen.sizes))
            if fewer is not None and fewer.value <= headroom:
                return ScalingAction.STOP, fewer
        return ScalingAction.HOLD, None

    def _with_more_workers(self, seen: PoolObservation) -> _Pressure | None:
        """With the fewest additional workers that meet the headroom; if none do, with as many as one change may add."""
        most, found = min(self._limits.workers[1], _most_after_change(seen.sizes)), None
        for workers in range(seen.sizes.workers + 1, most + 1):
            found = self._best(seen, self._larger(seen.sizes, workers))
            if found is not None and found.value <= self._spec.headroom:
                break
        return found

    def _with_other_roles(self, current: PoolSizes, most: int) -> Iterator[PoolSizes]:
        """With up to `most` role changes."""
        if self._limits.can_change_roles:
            for prefill in range(current.prefill - most, current.prefill + most + 1):
                if prefill != current.prefill:
                    yield PoolSizes(prefill, current.workers - prefill)

    def _larger(self, current: PoolSizes, workers: int) -> Iterator[PoolSizes]:
        for prefill in range(current.prefill, current.prefill + workers - current.workers + 1):
            yield PoolSizes(prefill, workers - prefill)

    def _smaller(self, current: PoolSizes) -> Iterator[PoolSizes]:
        yield PoolSizes(current.prefill - 1, current.decode)
        yield PoolSizes(current.prefill, current.decode - 1)

    def _best(self, seen: PoolObservation, candidates: Iterable[PoolSizes]) -> _Pressure | None:
        """The candidate with the least pressure; among equals the one with the fewest role changes."""
        found = [self._pressure(seen, each) for each in candidates if min(each) >= 0 and self._limits.allow(each)]
        found = [
            replace(each, seen=self._left[each.sizes].pressure) if each.sizes in self._left else each for each in found
        ]
        return min(found, key=lambda each: (each.value, abs(each.sizes.prefill - seen.sizes.prefill)), default=None)

    # ---- the waits

    def _wait_s(self, action: ScalingAction, load: ModelLoad, now_s: float) -> float:
        last = self._last
        backoff = self._backoff if last is not None and _is_same_load(last.load, load) else 1.0
        if action is ScalingAction.STOP:
            since_s = now_s if self._idle_since_s is None else self._idle_since_s
            return since_s + backoff * self._spec.stop_after_s - now_s
        if last is None:
            return 0.0
        cooldown_s = self._spec.role_cooldown_s if action is ScalingAction.CHANGE_ROLES else self._spec.start_cooldown_s
        return last.at_s + backoff * cooldown_s - now_s

    # ---- predictions

    def _pressure(self, seen: PoolObservation, sizes: PoolSizes) -> _Pressure:
        found, load = self._forecast(seen, sizes), seen.load
        has_prefill_load = load.requests_per_s > 0 or load.queued_tokens > 0
        has_decode_load = load.answer_tokens_per_s > 0 or load.decoding_requests > 0
        ttft, tpot = self._shares(found)
        ttft_factor, tpot_factor = self._missed_factors(seen)
        return _Pressure(sizes, found, has_prefill_load * ttft * ttft_factor, has_decode_load * tpot * tpot_factor)

    def _forecast(self, seen: PoolObservation, sizes: PoolSizes) -> Forecast:
        """With the best share of prompts prefilled on decode workers, as the router chooses it."""
        return min(forecasts(sizes, seen.load, seen.capability), key=lambda each: max(*self._shares(each), each.fill))

    def _shares(self, found: Forecast) -> tuple[float, float]:
        """TTFT and TPOT as shares of their objectives; 0 without an objective."""
        ttft_s, tpot_s = self._objectives.ttft_s, self._objectives.tpot_s
        return (
            0.0 if ttft_s is None else self._ttft_correction * found.ttft_tail_s / ttft_s,
            0.0 if tpot_s is None else found.tpot_s / tpot_s,
        )

    def _missed_factors(self, seen: PoolObservation) -> tuple[float, float]:
        """Factors that raise the predicted TTFT and TPOT to their objectives if many requests missed them. If the
        prediction is further off than the bound of CORRECTIONS, more workers are not the remedy."""
        measured = seen.measured
        if measured.judged < MIN_MEASURED:
            return 1.0, 1.0
        ttft, tpot = self._shares(self._forecast(seen, seen.sizes))
        many = MISSED_SHARE * measured.judged
        return (
            _to_reach_one(ttft) if measured.missed_ttft > many else 1.0,
            _to_reach_one(tpot) if measured.missed_tpot > many else 1.0,
        )

    def _correct(self, seen: PoolObservation) -> None:
        measured = seen.measured
        if measured.ttft_s is None or measured.requests < MIN_MEASURED:
            return
        predicted_s = self._forecast(seen, seen.sizes).ttft_s
        if predicted_s > 0:
            least, most = CORRECTIONS
            ratio = max(least, min(most, measured.ttft_s / predicted_s))
            self._ttft_correction += CORRECTION_WEIGHT * (ratio - self._ttft_correction)

    # ---- reasons

    def _hold(self, seen: PoolObservation, reason: str) -> ScalingDecision:
        return ScalingDecision(ScalingAction.HOLD, seen.sizes, seen.sizes, reason, seen.load)

    def _why(self, action: ScalingAction, now: _Pressure, best: _Pressure) -> str:
        if action is ScalingAction.STOP:
            return f"at {STOP_MARGIN:g} times the load and without this worker: {self._words(best)}"
        return f"{self._words(now)}; then {self._words(best)}"

    def _why_not(self, now: _Pressure) -> str:
        if now.value <= self._spec.headroom:
            return f"within the objectives: {self._words(now)}"
        return f"no change within the limits would be clearly better: {self._words(now)}"

    def _words(self, pressure: _Pressure) -> str:
        found, parts = pressure.forecast, []
        if self._objectives.ttft_s is not None:
            parts.append(f"TTFT {100 * pressure.ttft:.0f} % of {self._objectives.ttft_s:g} s")
        if self._objectives.tpot_s is not None:
            parts.append(f"TPOT {100 * pressure.tpot:.0f} % of {1000 * self._objectives.tpot_s:g} ms")
        return f"{', '.join(parts)}, decode places {100 * found.fill:.0f} %"


def _to_reach_one(share: float) -> float:
    return min(CORRECTIONS[1], max(1.0, 1 / share)) if share > 0 else 1.0


def _direction(before: PoolSizes, after: PoolSizes) -> tuple[int, int]:
    """For each role: 1 more workers, -1 fewer, 0 as many."""
    changes = after.prefill - before.prefill, after.decode - before.decode
    return (changes[0] > 0) - (changes[0] < 0), (changes[1] > 0) - (changes[1] < 0)


def _most_after_change(current: PoolSizes) -> int:
    """The most workers that one change may lead to."""
    return current.workers + max(1, current.workers // 4)


def _is_same_load(one: ModelLoad, other: ModelLoad) -> bool:
    pairs = (
        (one.prefill_tokens_per_s, other.prefill_tokens_per_s),
        (one.answer_tokens_per_s, other.answer_tokens_per_s),
    )
    return all(max(pair) <= SAME_LOAD * min(pair) or max(pair) == 0 for pair in pairs)


def _reverts(last: _Change, decision: ScalingDecision) -> bool:
    """Whether a pool that grew now shrinks, or the reverse."""
    before, after = _direction(last.before, last.after), _direction(decision.current, decision.target)
    return any(one * other < 0 for one, other in zip(before, after, strict=True))
