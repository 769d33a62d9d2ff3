"""`tandem calibrate`: fits corrections of the step times to a running cluster's recorded requests."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.cli.commands.planning.inputs import SYNTHETIC, HardwareFlags, TrafficFlags, check_writable, describe_cost
from cluster.cli.commands.planning.simulate import ClusterFlags, load_simulation
from cluster.cli.console import console
from planner.calibration.calibrate import Corrected, calibrate
from planner.calibration.file import Calibration, Figure, HeldOut, write_calibration
from planner.hardware import cost_digest
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.errors import InputError
from tandem.text.words import seconds


@dataclass(frozen=True, slots=True)
class CalibrateFlags:
    traffic: TrafficFlags
    hardware: HardwareFlags
    cluster: ClusterFlags
    output: Path
    json: bool = False


def run_calibrate(flags: CalibrateFlags) -> int:
    """Raises InputError, ConfigError."""
    if flags.traffic.trace == SYNTHETIC:
        raise InputError(
            "trace: expected a recorded trace (`tandem trace record`), got synthetic, which no cluster has served",
            field="trace",
        )
    check_writable("--output", flags.output)
    loaded = load_simulation(flags.traffic, flags.hardware, flags.cluster)
    hardware, tp = loaded.hardware.of(Role.DECODE), loaded.setup.decode.tp  # no role has a device of its own here
    corrected = Corrected(hardware.model.name, hardware.device.name, cost_digest(hardware, tp))
    shown = Console(stderr=True).status("simulating the recorded requests, about 35 times")
    with shown if sys.stderr.isatty() else nullcontext():
        found = calibrate(loaded.trace, loaded.setup, corrected, datetime.now(UTC))
    write_calibration(found, flags.output)
    if flags.json:
        print(found.model_dump_json(indent=2))
    else:
        show(found, loaded.trace, describe_cost(hardware, tp), flags.output, console())
    return 0


def show(found: Calibration, trace: TrafficTrace, cost: str, output: Path, console: Console) -> None:
    load = found.load
    console.print(
        f"[bold]{trace.name}[/]: {load.requests} requests at {load.requests_per_s:.2f} requests/s, "
        f"{load.prompt_tokens:.0f} prompt and {load.output_tokens:.0f} output tokens on average, up to "
        f"{load.decode_batch:.0f} in a decode batch"
    )
    console.print(f"step times: {cost}", style="dim")
    console.print(
        f"prefill steps x {found.prefill:.3f}, decode steps x {found.decode:.3f}, {1000 * found.fixed_s:.1f} ms before "
        "the first token"
    )
    for note in (*trace.notes, *found.notes):
        console.print(f"note: {note}", style="yellow", markup=False)
    console.print(_figures(found.held_out))
    before = "" if found.held_out.error_before is None else f", {found.held_out.error_before:.0%} before"
    held_out = found.held_out
    console.print(
        f"off by {held_out.error:.0%} on average{before} (90 % of bootstrap draws: {held_out.low:.0%} to "
        f"{held_out.high:.0%})"
    )
    console.print(f"written: {output}", markup=False)


def _figures(held_out: HeldOut) -> Table:
    title = f"On {held_out.requests} requests that the corrections were not fitted to"
    table = Table("", "measured", "before", "off", "after", "off", "90 % of draws", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in held_out.figures:
        table.add_row(
            f"{each.metric} {each.percentile}", seconds(each.measured_s), seconds(each.before_s),
            _off(each, each.before_s), seconds(each.after_s), _off(each, each.after_s),
            f"{100 * each.low:+.0f} to {100 * each.high:+.0f} %",
        )  # fmt: skip
    return table


def _off(figure: Figure, predicted_s: float | None) -> str:
    if predicted_s is None or not figure.measured_s:
        return "–"
    return f"{100 * (predicted_s / figure.measured_s - 1):+.0f} %"
