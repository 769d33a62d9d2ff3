"""How large a plan's pools have to be in each part of its traffic, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.layout import ClusterLayout
from planner.search.machines import MachineKinds
from planner.search.traffic import least_span_s
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError
from tandem.text.words import plural

LEAST_REQUESTS = 50  # of a part, on average: fewer say little about a percentile
MOST_PARTS = 288  # five minutes of a day each


@dataclass(frozen=True, slots=True)
class Part:
    """`start_s`, `end_s`: since the first request, as recorded; `requests_per_s`: as planned for. `joint`: the share of
    requests within their objectives; None: not simulated, because one request or none came, or all at one time.
    `meets` False: neither the plan nor anything smaller meets the goal in this part."""

    start_s: float
    end_s: float
    requests: int
    requests_per_s: float
    layout: ClusterLayout
    joint: float | None
    meets: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """`per_hour`: dollars on whole machines, on average over all parts; `fixed_per_hour`: of the plan all the time.
    `devices`: on average; `fixed_devices`: of the plan."""

    parts: tuple[Part, ...]
    devices: float
    fixed_devices: int
    per_hour: float
    fixed_per_hour: float

    @classmethod
    def of(cls, parts: Sequence[Part], plan: ClusterLayout, machines: MachineKinds) -> Schedule:
        deployed, fixed = [machines.deployed(each.layout) for each in parts], machines.deployed(plan)
        count = len(parts)
        return cls(
            tuple(parts),
            sum(each.devices for each in deployed) / count,
            fixed.devices,
            sum(each.per_hour for each in deployed) / count,
            fixed.per_hour,
        )

    @property
    def changes(self) -> int:
        """From one part to the next."""
        return sum(one.layout != other.layout for one, other in zip(self.parts, self.parts[1:], strict=False))

    def lines(self) -> Iterator[str]:
        saved = 1 - self.devices / self.fixed_devices
        priced = f", ${self.per_hour:.2f} instead of ${self.fixed_per_hour:.2f} per hour" if self.fixed_per_hour else ""
        yield (
            f"by this schedule {self.devices:.1f} instead of {self.fixed_devices} devices on average, {saved:.0%} "
            f"less{priced}; {plural(self.changes, 'change')}"
        )
        if missed := sum(not each.meets for each in self.parts):
            yield f"in {missed} of {len(self.parts)} parts the plan itself does not meet the goal"
        yield (
            "each part is simulated alone: a pool that grows must be up before its part begins, and one that shrinks "
            "drains"
        )


def least_of(plan: ClusterLayout) -> ClusterLayout:
    """One worker of each role."""
    prefill = min(1, plan.prefill_workers)
    return ClusterLayout(prefill, plan.prefill_tp, 1, plan.decode_tp, plan.step_tokens)


def is_smaller(layout: ClusterLayout, plan: ClusterLayout) -> bool:
    """Whether `plan` becomes it, or stays as it is, by other numbers of workers on no more devices."""
    same = (layout.decode_tp, layout.step_tokens, layout.is_aggregated) == (
        plan.decode_tp, plan.step_tokens, plan.is_aggregated
    )  # fmt: skip
    same = same and (plan.is_aggregated or layout.prefill_tp == plan.prefill_tp)
    return same and layout.devices <= plan.devices


@dataclass(frozen=True, slots=True)
class Slot:
    """An equal part of a trace's time. `traffic` None: one request or none comes."""

    start_s: float
    end_s: float
    requests: int
    traffic: TrafficTrace | None

    def with_plan(self, layout: ClusterLayout, joint: float | None, load: float, *, meets: bool) -> Part:
        """`load`: the factor by which the trace is faster than it was recorded."""
        rate = self.requests / (self.end_s - self.start_s)
        return Part(load * self.start_s, load * self.end_s, self.requests, rate, layout, joint, meets)


def slots_of(trace: TrafficTrace, count: int) -> Iterator[Slot]:
    edges = np.linspace(0.0, trace.span_s, count + 1)
    ends = np.append(edges[1:-1], np.inf)  # the last request belongs to the last part
    for start_s, end_s, until_s in zip(edges[:-1].tolist(), edges[1:].tolist(), ends.tolist(), strict=True):
        arrivals = trace.arrival_s[(trace.arrival_s >= start_s) & (trace.arrival_s < until_s)]
        yield Slot(start_s, end_s, len(arrivals), trace.between(start_s, until_s) if len(arrivals) > 1 else None)


def clock(seconds: float) -> str:
    """`26:05` hours and minutes, or `0:00:12.5` of parts shorter than a minute."""
    minutes, rest = divmod(round(seconds, 1), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}" if not rest else f"{hours}:{minutes:02d}:{rest:04.1f}"


def check_count(count: int) -> None:
    """Raises ConfigError."""
    if not 2 <= count <= MOST_PARTS:
        raise ConfigError(f"--schedule: expected from 2 to {MOST_PARTS} parts, got {count}", field="--schedule")


def check_parts(count: int, trace: TrafficTrace, tpot_s: float | None) -> None:
    """Raises ConfigError, also for parts that end before answers make room for others."""
    check_count(count)
    if len(trace) < LEAST_REQUESTS * count:
        raise ConfigError(
            f"--schedule: expected at least {LEAST_REQUESTS} requests in a part on average, got {len(trace)} in "
            f"{count} parts: ask for fewer, or use a longer trace",
            field="--schedule",
        )
    least_s = 0.0 if tpot_s is None else least_span_s(trace, tpot_s)
    if trace.span_s < count * least_s:
        raise ConfigError(
            f"--schedule: expected parts of at least {least_s:.3g} s, two answers of mean length at --tpot, got "
            f"{trace.span_s / count:.3g} s: in shorter ones fewer requests run at a time; ask for fewer parts",
            field="--schedule",
        )
