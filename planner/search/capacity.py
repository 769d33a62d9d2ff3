"""How much of a traffic given devices serve, how much more a plan does, and how much of it quiet hours need."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from planner.hardware import RoleHardware
from planner.search.goal import Goal
from planner.search.headroom import LEAST_LOAD, Headroom
from planner.search.layout import ClusterLayout
from planner.search.machines import MachineKinds
from planner.search.plan import Plan, PlanSearch, SearchOptions
from planner.search.schedule import Schedule, check_parts, is_smaller, least_of, slots_of
from planner.search.traffic import busiest
from planner.search.trials import SearchProgress
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError


def plan_largest_load(
    trace: TrafficTrace,
    hardware: RoleHardware,
    goal: Goal,
    options: SearchOptions,
    progress: SearchProgress = lambda what, done, total: None,
    growth: float | None = None,
) -> Plan:
    """For the largest load that a layout of up to `goal.max_devices` serves within the goal; if none serves any, for
    the least load that was tried. Raises as `make_plan` does, and ConfigError for a goal without a TTFT objective."""
    ttft_s, devices = ttft_of(goal, "--max-load"), f"up to {goal.max_devices} x {hardware.name}"
    with PlanSearch(trace, hardware, goal, options, progress) as search:
        found = Headroom.measured(devices, search.is_met_at, search.span_s, ttft_s, growth)
        plan = search.plan(LEAST_LOAD if found is None else found.load)
    return replace(plan, headroom=found)


def with_headroom(
    plan: Plan,
    trace: TrafficTrace,
    hardware: RoleHardware,
    options: SearchOptions,
    growth: float,
    progress: SearchProgress = lambda what, done, total: None,
) -> Plan:
    """With the largest load that the chosen layout serves, of the traffic that was planned for."""
    layout = None if plan.chosen is None else plan.chosen.layout
    if layout is None:
        return plan
    ttft_s = ttft_of(plan.goal, "--growth")
    with PlanSearch(trace, hardware, plan.goal, options, progress) as search:
        found = Headroom.measured(
            "the plan", lambda load: search.is_met_by(layout, load), search.span_s, ttft_s, growth
        )
    return replace(plan, headroom=found)


def with_schedule(
    plan: Plan,
    trace: TrafficTrace,
    hardware: RoleHardware,
    options: SearchOptions,
    parts: int,
    progress: SearchProgress = lambda what, done, total: None,
    load: float = 1.0,
) -> Plan:
    """With the cheapest sizes of the chosen layout's pools for each of `parts` equal parts of the traffic's time.
    `load`: the factor by which `trace` is faster than it was recorded. Raises ConfigError as `check_parts` does."""
    trace, load = trace.at_rate(plan.load), load * plan.load
    check_parts(parts, trace, plan.goal.slo.tpot_s)
    if plan.chosen is None:
        return plan
    whole, goal = plan.chosen.layout, replace(plan.goal, max_devices=plan.chosen.layout.devices)
    family = partial(may_replace, plan=whole, machines=plan.machines)
    found = []
    for number, slot in enumerate(slots_of(trace, parts)):
        progress("parts of the schedule", number, parts)
        if slot.traffic is None:
            found.append(slot.with_plan(least_of(whole), None, load, meets=True))
        elif not busiest(slot.traffic, options.requests).span_s:
            found.append(slot.with_plan(whole, None, load, meets=True))
        else:
            with PlanSearch(slot.traffic, hardware, goal, options, lambda what, done, total: None, family) as search:
                best, meets = search.cheapest(whole)
            found.append(slot.with_plan(best.layout, best.joint, load, meets=meets))
    progress("parts of the schedule", parts, parts)
    return replace(plan, schedule=Schedule.of(found, whole, plan.machines))


def may_replace(layout: ClusterLayout, plan: ClusterLayout, machines: MachineKinds) -> bool:
    """Whether `plan` may become it for a part of its time: with fewer workers, on machines that cost no more."""
    return is_smaller(layout, plan) and machines.deployed_price(layout) <= machines.deployed_price(plan)


def ttft_of(goal: Goal, option: str) -> float:
    """Raises ConfigError if `goal` has no TTFT objective: then requests may wait for ever, and any load is served."""
    if (ttft_s := goal.slo.loosest().ttft_s) is None:
        raise ConfigError(
            f"{option}: expected --ttft with it: without it requests may wait without end, and any load meets the goal",
            field="--ttft",
        )
    return ttft_s


def check_growth(growth: float, goal: Goal) -> None:
    """Raises ConfigError."""
    ttft_of(goal, "--growth")
    if not (0 < growth <= 1 and math.isfinite(growth)):
        raise ConfigError(
            f"--growth: expected a share above 0 and up to 1, such as 0.05 for 5 % a month, got {growth:g}",
            field="--growth",
        )
