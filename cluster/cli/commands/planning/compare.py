"""`tandem compare A B`: prints two results of `tandem simulate` or `tandem bench` side by side, or what changed between
two of `tandem plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.cli.commands.planning.inputs import check_writable
from planner.compare import MetricRow, Unit, compared, doubts, is_result
from planner.pages.changes_page import changes_page
from planner.search.plan_changes import PlanChanges, is_plan
from tandem.errors import InputError
from tandem.text.words import seconds, size

MAX_BYTES = 16 << 20


def run_compare(a: Path, b: Path, as_json: bool, report: Path | None = None) -> int:
    """Raises InputError."""
    check_writable("--report", report)
    first, second = _read(a), _read(b)
    if is_plan(first) and is_plan(second):
        return _compare_plans((a, first), (b, second), as_json, report)
    _check(a, first)
    _check(b, second)
    if report is not None:
        raise InputError("--report: expected two results of `tandem plan --json` with it", field="--report")
    lines, warnings = compared(first, second), list(doubts(first, second))
    if as_json:
        found = {"a": str(a), "b": str(b), "doubts": warnings, "metrics": [line.to_json() for line in lines]}
        print(json.dumps(found, indent=2))
        return 0
    console = Console(highlight=False)
    for warning in warnings:
        console.print(f"note: {warning}", style="yellow", markup=False)
    console.print(_table(lines, a.name, b.name))
    return 0


def _compare_plans(
    a: tuple[Path, dict[str, Any]], b: tuple[Path, dict[str, Any]], as_json: bool, report: Path | None
) -> int:
    (first_path, first), (second_path, second) = a, b
    names = (first_path.name, second_path.name)
    try:
        found = PlanChanges.between(first, second)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{names[0]}, {names[1]}: expected plans of this version of Tandem: {type(error).__name__} {error}",
            field="result",
        ) from None
    rows = [*found.rows, *found.conditions]
    if report is not None:
        cells = [(line.metric, *_values(line), _difference(line)) for line in rows]
        report.write_text(changes_page(first, second, names, cells), encoding="utf-8")
    if as_json:
        print(json.dumps({"a": str(first_path), "b": str(second_path), **found.to_json()}, indent=2))
        return 0
    console = Console(highlight=False)
    console.print(f"{found.layouts[0]} became {found.layouts[1]}", markup=False)
    for what, one, other in found.asked:
        console.print(f"asked otherwise: {what}: {one}, then {other}", style="yellow", markup=False)
    console.print(_table(rows, *names))
    return 0


def _table(lines: Sequence[MetricRow], first: str, second: str) -> Table:
    table = Table("", first, second, "difference")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(line.metric, *_values(line), _difference(line))
    return table


def _values(line: MetricRow) -> tuple[str, str]:
    return metric_value(line.a, line.unit), metric_value(line.b, line.unit)


def _read(path: Path) -> dict[str, Any]:
    """Raises InputError."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise InputError(f"{path}: expected a result: {error.strerror}", field="result") from None
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def _check(path: Path, found: dict[str, Any]) -> None:
    """Raises InputError."""
    if is_plan(found):
        raise InputError(
            f"{path}: expected the output of `tandem simulate --json` or `tandem bench --json` beside another, got a "
            "plan: compare it with a plan",
            field="result",
        )
    if not is_result(found):
        raise InputError(
            f"{path}: expected the output of `tandem simulate --json`, `tandem bench --json` or `tandem plan --json`",
            field="result",
        )


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
        case Unit.DOLLARS:
            return f"${value:.3f}"


def _difference(line: MetricRow) -> str:
    if line.points is not None:
        return f"{line.points:+.1f} points"
    return "–" if line.percent is None else f"{line.percent:+.1f} %"
