"""`tandem plan`: finds the cheapest cluster that serves a traffic within its objectives."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.cli.commands.planning.candidates import load_candidates
from cluster.cli.commands.planning.inputs import (
    HardwareFlags,
    TrafficFlags,
    calibration_json,
    check_writable,
    describe_costs,
    load_traffic,
    reach_of,
)
from cluster.cli.console import BOXED, console, fitted
from planner.fitted import Reach
from planner.hardware import RoleHardware
from planner.pages.report import html_report
from planner.search.capacity import check_growth, plan_largest_load, ttft_of, with_headroom, with_schedule
from planner.search.choices import Choice, plan_on_each
from planner.search.classes import check_classes
from planner.search.costs import COST_TITLES, money
from planner.search.evaluate import Evaluation
from planner.search.goal import Goal
from planner.search.plan import Plan, SearchOptions, make_plan, with_grid
from planner.search.roofline import RooflineChart, rooflines_of
from planner.search.schedule import Schedule, check_count, check_parts, clock
from planner.search.traffic import BUSIEST
from planner.search.trials import RESAMPLES, SearchProgress
from planner.search.values import check_values, checked_source, describe_machines, helm_values
from planner.traces.context import check_context
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.errors import ConfigError
from tandem.text.words import plural, seconds

UNSATISFIABLE = 3  # exit code


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """`source`: the checkpoint in the values file. A path of None is not written. `max_load`: plan for the largest load
    that the devices serve. `growth`: of the traffic, in a month. `mix_roles`: plan for pairs of devices too.
    `schedule`: parts of the trace to size the plan's pools for."""

    traffic: TrafficFlags
    hardware: HardwareFlags
    goal: Goal
    source: str | None = None
    simulated_requests: int = 1000
    jobs: int | None = None
    state: Path | None = None
    report: Path | None = None
    values: Path | None = None
    json: bool = False
    price: str | None = None
    max_load: bool = False
    growth: float | None = None
    mix_roles: bool = False
    schedule: int | None = None


def run_plan(flags: PlanFlags) -> int:
    """Raises InputError, ConfigError."""
    if flags.source is not None and flags.values is None:
        raise ConfigError(
            f"--source: expected together with --values, the file that it is for, got {flags.source}", field="--source"
        )
    source = checked_source(flags.source, flags.hardware.model) if flags.values is not None else ""
    candidates = load_candidates(flags.hardware, flags.price, mix_roles=flags.mix_roles)
    _check_before_the_search(flags, candidates)
    trace = load_traffic(flags.traffic)
    check_context(trace, candidates[0].model.context_tokens)
    if flags.values is not None:
        check_classes(trace.labels)
    if flags.schedule is not None:
        check_parts(flags.schedule, trace, flags.goal.slo.tpot_s)
    choices = _search(trace, candidates, flags)
    hardware, plan = choices[0].hardware, choices[0].plan
    assert plan is not None  # otherwise the search raises
    asked = reach_of(trace, max(flags.goal.step_tokens), flags.goal.max_running_requests)
    cost_model, machines = cost_model_of(plan, hardware, asked), describe_machines(plan)
    rooflines = rooflines_of(plan, hardware, trace)
    if flags.report is not None:
        notes = [*_roles(plan), *([machines] if machines is not None else []), *map(_told, choices[1:])]
        flags.report.write_text(html_report(plan, cost_model, notes, rooflines), encoding="utf-8")
    if flags.values is not None and plan.chosen is not None:
        flags.values.write_text(helm_values(plan, hardware, source, trace.labels), encoding="utf-8")
    if flags.json:
        several = {"choices": [each.to_json() for each in choices]} if len(choices) > 1 else {}
        found = {"cost_model": cost_model, **calibration_json(hardware), **plan.to_json(), **_roofline(rooflines)}
        print(json.dumps({**found, **several}, indent=2, allow_nan=False))
    else:
        if len(choices) > 1:
            console().print(_choices(choices, console().width))
        show(plan, cost_model, machines, console())
    return 0 if plan.chosen is not None else UNSATISFIABLE


def cost_model_of(plan: Plan, hardware: RoleHardware, asked: Reach | None = None) -> str:
    """The source of the step times of the plan's workers; without a plan, of those of the layout that came closest."""
    shown = plan.chosen or next(iter(plan.finalists), None)
    if shown is None:
        return describe_costs(hardware, hardware.of(Role.DECODE).widths()[0], asked=asked)
    return describe_costs(hardware, shown.layout.decode_tp, (tp for _, tp in shown.layout.widths), asked)


def _roofline(charts: Sequence[RooflineChart]) -> dict[str, Any]:
    """One, or that of each role."""
    found = [asdict(each) for each in charts]
    if len(found) < 2:
        return {"roofline": found[0]} if found else {}
    return {"roofline": dict(zip((role.value for role in Role), found, strict=True))}


def _roles(plan: Plan) -> list[str]:
    """What is on which device, if they differ."""
    if not plan.machines.is_mixed:
        return []
    places = " and ".join(f"{role} workers on {plan.machines.of_role(role).device}" for role in Role)
    return [f"{plan.device}: {places}"]


def _check_before_the_search(flags: PlanFlags, candidates: Sequence[RoleHardware]) -> None:
    """What would otherwise lose its result."""
    for option, path in (("--report", flags.report), ("--values", flags.values), ("--state", flags.state)):
        check_writable(option, path)
    if flags.values is not None:
        for hardware in candidates:
            check_values(hardware)
    if flags.growth is not None:
        check_growth(flags.growth, flags.goal)
    if flags.schedule is not None:
        check_count(flags.schedule)
    if flags.max_load:
        ttft_of(flags.goal, "--max-load")
        if len(candidates) > 1 and not flags.mix_roles:
            raise ConfigError(
                f"--max-load: expected one --device with it, got {flags.hardware.device}: plan for one after the other",
                field="--max-load",
            )


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _search(trace: TrafficTrace, candidates: Sequence[RoleHardware], flags: PlanFlags) -> list[Choice]:
    """The best first."""
    means = SearchOptions(flags.simulated_requests, flags.jobs or _cores(), flags.state)
    with _shown_progress(flags) as progress:
        make = partial(plan_largest_load, growth=flags.growth) if flags.max_load else make_plan
        best, *others = plan_on_each(trace, candidates, flags.goal, means, progress, make)
        plan, hardware = best.plan, best.hardware
        if plan is None:
            return [best, *others]
        if flags.growth is not None and not flags.max_load:
            plan = with_headroom(plan, trace, hardware, means, flags.growth, progress)
        if flags.schedule is not None:
            plan = with_schedule(plan, trace, hardware, means, flags.schedule, progress, flags.traffic.load)
        if flags.report is not None:
            plan = with_grid(plan, trace, hardware, means, progress)
        return [replace(best, plan=plan), *others]


@contextmanager
def _shown_progress(flags: PlanFlags) -> Iterator[SearchProgress]:
    """One bar for each task, if a person watches."""
    if flags.json or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress


def show(plan: Plan, cost_model: str, machines: str | None, console: Console) -> None:
    """`machines`: a note on machines that the deployment adds to the plan."""
    devices = f"{plan.goal.max_devices} x {plan.device}"
    traffic, *notes = plan.traffic
    rate = f"{plan.requests_per_s:.2f} requests/s ({_stretch(notes)})"
    console.print(f"[bold]{plan.model}[/] on up to {devices} for {escape(traffic)}, {rate}")
    for note in (*notes, *_roles(plan), f"step times: {cost_model}"):
        console.print(f"note: {note}", style="dim", markup=False)
    if (longest_s := plan.goal.longest_step_s) is not None:
        console.print(f"note: with engine.longest_step_s: {longest_s:g}", style="dim")
    possible = f"{plan.possible} feasible by their bounds"
    console.print(f"{plan.considered} layouts, {possible}, {plan.simulated} simulations", style="dim")
    if plan.finalists:
        console.print(_finalists(plan, console.width))
    if plan.chosen is None:
        console.print(f"[red]Nothing meets the goal:[/] {'' if plan.miss is None else plan.miss.explanation}")
        if plan.resampled:
            console.print(_resampled(plan, console.width))
        return
    console.print(f"[green]The plan:[/] [bold]{plan.chosen.layout}[/] ({plural(plan.chosen.layout.devices, 'device')})")
    if plan.chosen.of_class:
        console.print(escape(plan.chosen.class_line))
    if (beside := plan.same_price_note()) is not None:
        console.print(beside)
    for line in plan.headroom_lines():
        console.print(line)
    console.print(_costs(plan, console.width))
    if plan.chosen.rejected:
        console.print(f"note: {plan.chosen.rejected} of {plan.chosen.job.requests} requests are refused", style="dim")
    if machines is not None:
        console.print(f"note: {machines}", style="dim")
    console.print(_variants(plan, console.width))
    console.print(_resampled(plan, console.width))
    if plan.schedule is not None:
        console.print(_schedule(plan, plan.schedule, console.width))
        for line in plan.schedule.lines():
            console.print(line)
    console.print(plan.verdict)


def _stretch(notes: list[str]) -> str:
    """What the rate is measured over, which may be only the busiest part of the trace."""
    return next((note for note in notes if note.startswith(BUSIEST)), "as they were drawn or recorded")


def _told(choice: Choice) -> str:
    """Of a device that is not the plan's."""
    found = choice.to_json()
    if choice.plan is None or choice.plan.chosen is None:
        return f"{found['device']} instead: {found['why_not']}"
    layout = choice.plan.chosen.layout
    load = "" if choice.load is None else f", load x {choice.load:g}"
    cost = f"{plural(layout.devices, 'device')}, ${choice.per_hour:.2f} per hour"
    return f"{found['device']} instead: {layout}, {cost}{load}"


def _choices(choices: Sequence[Choice], width: int) -> Table:
    has_loads = any(each.load is not None for each in choices)
    rows = []
    for each in choices:
        found = each.to_json()
        chosen = None if each.plan is None else each.plan.chosen
        load = ["–" if each.load is None else f"{each.load:g}"] if has_loads else []
        if chosen is None:
            rows.append((found["device"], "–", "–", "–", *load, found["why_not"]))
        else:
            cost = (str(found["devices"]), f"{each.per_hour:.2f}")
            rows.append((found["device"], str(chosen.layout), *cost, *load, ""))
    titles = ("device", "layout", "devices", "$/h", *(["load x"] if has_loads else []), "why not")
    left = ("device", "layout", "why not")
    return fitted(width, titles, rows, left=left, spare=("devices",), folded=left[2:], title="Devices", box=BOXED)


def _finalists(plan: Plan, width: int) -> Table:
    found = sorted(plan.finalists, key=lambda found: (plan.price(found.layout), -found.joint))
    rows = [[Text(cell, "green" if plan.meets(each) else "") for cell in _row(each, plan)] for each in found]
    titles = ("layout", "devices", "$/h", "deployed", "met", "goodput", "TTFT p90", "TPOT p90", "busy")
    title = "Finalists (prefill : decode @ tokens of a step; deployed: devices of whole machines, $/h)"
    spare = ("busy", "goodput", "$/h", "deployed")
    return fitted(width, titles, rows, left=("layout",), spare=spare, title=title, box=BOXED)


def _row(found: Evaluation, plan: Plan) -> tuple[str, ...]:
    layout = found.layout
    return (
        str(layout), str(layout.devices), f"{plan.per_hour(layout):.2f}", str(plan.deployed(layout)),
        f"{found.joint:.1%}", f"{found.goodput_per_s:.2f}", seconds(found.ttft_p90_s), seconds(found.tpot_p90_s),
        f"{found.busy:.0%}",
    )  # fmt: skip


def _costs(plan: Plan, width: int) -> Table:
    rows = [
        (each.what, str(each.devices), f"${each.per_hour:.2f}", money(each.per_million_tokens),
         money(each.per_million_output_tokens))
        for each in plan.costs
    ]  # fmt: skip
    return fitted(width, COST_TITLES, rows, left=COST_TITLES[:1], spare=("devices",), title="What it costs", box=BOXED)


def _variants(plan: Plan, width: int) -> Table:
    rows: list[tuple[str | Text, ...]] = []
    for each in plan.variants:
        found = each.evaluation
        if found is None:
            rows.append((each.name, "–", "–", "–", Text("no service", "red")))
            continue
        verdict = Text("holds", "green") if each.meets else Text("does not hold", "red")
        rows.append((each.name, f"{found.joint:.1%}", seconds(found.ttft_p90_s), seconds(found.tpot_p90_s), verdict))
    titles = ("what if", "met", "TTFT p90", "TPOT p90", "verdict")
    title = "The plan under other conditions"
    left, spare = ("what if", "verdict"), ("TPOT p90", "TTFT p90")
    return fitted(width, titles, rows, left=left, spare=spare, title=title, box=BOXED)


def _schedule(plan: Plan, found: Schedule, width: int) -> Table:
    rows = []
    for each in found.parts:
        met = "–" if each.joint is None else f"{each.joint:.1%}"
        sized = str(each.layout) if each.meets else f"{each.layout}, and does not meet the goal"
        times = f"{clock(each.start_s)} to {clock(each.end_s)}"
        rows.append((times, f"{each.requests_per_s:.2f}", sized, str(plan.deployed(each.layout)), met))
    titles = ("since the first request", "requests/s", "layout", "deployed", "met")
    left, title = ("since the first request", "layout"), "The plan's pools over time"
    return fitted(width, titles, rows, left=left, spare=("met", "deployed"), title=title, box=BOXED)


def _resampled(plan: Plan, width: int) -> Table:
    rows = [
        (str(each.layout), str(each.layout.devices), f"{each.met} of {RESAMPLES}", f"{each.low:.1%} to {each.high:.1%}")
        for each in plan.resampled
    ]
    titles = ("layout", "devices", "meets the goal", "requests within objectives")
    title = f"With {RESAMPLES} resampled traces"
    return fitted(width, titles, rows, left=("layout",), spare=("devices",), title=title, box=BOXED)
