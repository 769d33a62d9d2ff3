"""`tandem plan`: finds the cheapest cluster that serves a traffic within its objectives."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.cli.commands.planning.inputs import HardwareFlags, TrafficFlags, describe_cost, load_hardware, load_traffic
from cluster.cli.commands.planning.simulate import seconds
from cluster.cli.console import BOXED, console, fitted
from planner.hardware import Hardware
from planner.search.evaluate import Evaluation
from planner.search.halving import Effort
from planner.search.plan import Goal, Plan, SearchOptions, make_plan
from planner.search.report import html_report
from planner.search.traffic import BUSIEST
from planner.search.values import checked_source, describe_machines, helm_values
from planner.traces.trace import TrafficTrace
from tandem.text.words import plural

UNSATISFIABLE = 3  # exit code


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """`source`: the checkpoint in the values file. A path of None is not written."""

    traffic: TrafficFlags
    hardware: HardwareFlags
    goal: Goal
    source: str | None = None
    simulate: int = 1000
    jobs: int | None = None
    state: Path | None = None
    report: Path | None = None
    values: Path | None = None
    json: bool = False


def run_plan(flags: PlanFlags) -> int:
    """Raises InputError, ConfigError."""
    source = checked_source(flags.source, flags.hardware.model) if flags.values is not None else ""
    hardware = load_hardware(flags.hardware)
    trace = load_traffic(flags.traffic)
    means = SearchOptions(flags.jobs or _cores(), flags.state, Effort(flags.simulate))
    plan = _search(trace, hardware, flags, means)
    cost_model = describe_cost(hardware, plan.finalists[0].layout.decode_tp if plan.finalists else hardware.widths()[0])
    if flags.report is not None:
        flags.report.write_text(html_report(plan, cost_model), encoding="utf-8")
    if flags.values is not None and plan.chosen is not None:
        flags.values.write_text(helm_values(plan, hardware, source), encoding="utf-8")
    if flags.json:
        print(json.dumps({"cost_model": cost_model, **plan.to_json()}, indent=2, allow_nan=False))
    else:
        show(plan, cost_model, describe_machines(plan, hardware.device), console())
    return 0 if plan.chosen is not None else UNSATISFIABLE


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _search(trace: TrafficTrace, hardware: Hardware, flags: PlanFlags, means: SearchOptions) -> Plan:
    if flags.json or not sys.stderr.isatty():
        return make_plan(trace, hardware, flags.goal, means)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        return make_plan(trace, hardware, flags.goal, means, progress)


def show(plan: Plan, cost_model: str, machines: str | None, console: Console) -> None:
    """`machines`: a note on machines that the deployment adds to the plan."""
    devices = f"{plan.goal.max_devices} x {plan.device}"
    traffic, *notes = plan.traffic
    rate = f"{plan.requests_per_s:.2f} requests/s ({_stretch(notes)})"
    console.print(f"[bold]{plan.model}[/] on up to {devices} for {escape(traffic)}, {rate}")
    for note in (*notes, f"step times: {cost_model}"):
        console.print(f"note: {note}", style="dim")
    possible = f"{plan.possible} feasible by their bounds"
    console.print(f"{plan.considered} layouts, {possible}, {plan.simulated} simulations", style="dim")
    if plan.finalists:
        console.print(_finalists(plan, console.width))
    if plan.chosen is None or plan.costs is None:
        console.print(f"[red]Nothing meets the objectives:[/] {'' if plan.miss is None else plan.miss.explanation}")
        return
    costs = plan.costs
    console.print(f"[green]The plan:[/] [bold]{plan.chosen.layout}[/] ({plural(plan.chosen.layout.devices, 'device')})")
    console.print(
        f"${costs.per_hour:.2f} per hour; per million tokens {_money(costs.per_million_tokens)} "
        f"({_money(costs.per_million_tokens_busy)} busy), per million answer tokens "
        f"{_money(costs.per_million_output_tokens)}"
    )
    if machines is not None:
        console.print(f"note: {machines}", style="dim")
    console.print(_variants(plan, console.width))
    console.print(plan.verdict)


def _stretch(notes: list[str]) -> str:
    """What the rate is measured over, which may be only the busiest part of the trace."""
    return next((note for note in notes if note.startswith(BUSIEST)), "as they were drawn or recorded")


def _finalists(plan: Plan, width: int) -> Table:
    found = sorted(plan.finalists, key=lambda found: (found.layout.devices, -found.joint))
    rows = [[Text(cell, "green" if plan.meets(each) else "") for cell in _row(each, plan)] for each in found]
    titles = ("layout", "devices", "$/h", "met", "goodput", "TTFT p90", "TPOT p90", "busy")
    title = "Finalists (prefill : decode @ tokens of a step)"
    return fitted(width, titles, rows, left=("layout",), spare=("busy", "goodput", "$/h"), title=title, box=BOXED)


def _row(found: Evaluation, plan: Plan) -> tuple[str, ...]:
    layout = found.layout
    return (
        str(layout), str(layout.devices), f"{layout.devices * plan.price_per_hour:.2f}", f"{found.joint:.1%}",
        f"{found.goodput_per_s:.2f}", seconds(found.ttft_p90_s), seconds(found.tpot_p90_s), f"{found.busy:.0%}",
    )  # fmt: skip


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


def _money(value: float | None) -> str:
    return "–" if value is None else f"${value:.3f}"
