"""`tandem compare A B`: prints two results of `tandem simulate` or `tandem bench` side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.cli.commands.planning.simulate import seconds
from planner.compare import MetricRow, Unit, compared, doubts, is_result
from tandem.errors import InputError
from tandem.text.words import size

MAX_BYTES = 16 << 20


def run_compare(a: Path, b: Path, as_json: bool) -> int:
    """Raises InputError."""
    first, second = read_result(a), read_result(b)
    lines, warnings = compared(first, second), list(doubts(first, second))
    if as_json:
        report = {"a": str(a), "b": str(b), "doubts": warnings, "metrics": [line.to_json() for line in lines]}
        print(json.dumps(report, indent=2))
        return 0
    console = Console(highlight=False)
    for warning in warnings:
        console.print(f"note: {warning}", style="yellow", markup=False)
    table = Table("", a.name, b.name, "difference")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(line.metric, metric_value(line.a, line.unit), metric_value(line.b, line.unit), _difference(line))
    console.print(table)
    return 0


def read_result(path: Path) -> dict[str, Any]:
    """Raises InputError."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise InputError(f"{path}: expected a result: {error.strerror}", field="result") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not is_result(found):
        raise InputError(
            f"{path}: expected the output of `tandem simulate --json` or `tandem bench --json`", field="result"
        )
    return found


def metric_value(value: float | None, unit: Unit) -> str:
    if value is None:
        return "–"
    match unit:
        case Unit.SECONDS:
            return seconds(value)
        case Unit.SHARE:
            return f"{value:.1%}"
        case Unit.PER_SECOND:
            return f"{value:.2f}/s"
        case Unit.BYTES:
            return size(value)
        case Unit.COUNT:
            return f"{value:.0f}"


def _difference(line: MetricRow) -> str:
    if line.points is not None:
        return f"{line.points:+.1f} points"
    return "–" if line.percent is None else f"{line.percent:+.1f} %"
