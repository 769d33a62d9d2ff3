"""Traces in CSV: logs with times and lengths, as Azure's, and files of lengths alone, which need an arrival process."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from planner.traces.arrivals import ArrivalProcess
from planner.traces.rows import Condition, RowChoice, model_columns
from planner.traces.trace import TraceBuilder, TrafficTrace
from tandem.errors import InputError, InternalError

Value = TypeVar("Value")
# Names of columns in published files and in logs, in lower case.
TIMES = ("timestamp", "@timestamp", "ts", "arrived_at", "arrival_time", "arrival_s", "time", "datetime", "date",
         "created_at", "created", "start_time", "request_time", "timestamp_ms", "arrival_ms")  # fmt: skip
LENGTHS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("input_tokens", "output_tokens"),
    ("input_tokens", "completion_tokens"),
    ("input_length", "output_length"),
    ("contexttokens", "generatedtokens"),
)
_TIMES_ARE = "seconds, or a time such as 2023-11-16 18:15:46.6805900"
_UNITS = {1: "seconds", 10**3: "milliseconds", 10**6: "microseconds", 10**9: "nanoseconds"}
# Vidur's other columns, which follow from these two.
_DERIVED = {"num_total_tokens", "pd_ratio"}
_LONGEST_FIELD = 1 << 24  # a log may hold the prompts too


def header_of(path: Path) -> tuple[str, ...]:
    """Without spaces around the names."""
    with _reading(path) as reader:
        return tuple(name.strip() for name in next(reader, ()))


def time_column(header: tuple[str, ...]) -> str | None:
    return next((column for name in TIMES for column in header if column.lower() == name), None)


def length_columns(header: tuple[str, ...]) -> tuple[str, str] | None:
    """Of prompts and answers."""
    columns = {column.lower(): column for column in header}
    found = next((pair for pair in LENGTHS if set(pair) <= columns.keys()), None)
    return None if found is None else (columns[found[0]], columns[found[1]])


def read_log(path: Path, where: Sequence[Condition] = ()) -> TrafficTrace:
    """A log with a column of times and two of lengths, in whatever order its rows are. Raises InputError naming line,
    column and what was expected."""
    header = header_of(path)
    time, names = time_column(header), length_columns(header)
    if time is None or names is None:
        raise InternalError(f"{path.name}: expected columns of times and lengths")
    builder = TraceBuilder(path.name, most_early_s=math.inf)
    choice = RowChoice(path.name, where, model_columns(header))
    rows: list[tuple[int, datetime | float, int, int]] = []
    for line, row in choice.of(_rows(path, builder, header)):
        at = _parsed(builder, line, time, row[time], _time, _TIMES_ARE)
        if rows and not _are_alike(at, rows[0][1]):
            raise builder.wrong(line, time, "a time in the form of the first one", row[time])
        prompt, output = (_count(builder, line, row, name) for name in names)
        rows.append((line, at, prompt, output))
    numbers = [at for _, at, *_ in rows if isinstance(at, float)]
    scale = _per_second(max(map(abs, numbers), default=0.0), time)
    answered = [row for row in rows if row[-1]] or rows
    for line, at, prompt, output in answered:
        builder.add(line, _since(at, rows[0][1]) / (scale if numbers else 1), prompt, output)
    notes = [*choice.notes(), *([f"{time}: read as {_UNITS[scale]}"] if numbers else [])]
    if failed := len(rows) - len(answered):
        notes.append(f"left out: {failed} of {len(rows)} requests, which have no answer")
    used = {time, *names, *_DERIVED, *_looked_at(header, where)}
    if ignored := [column or "(no name)" for column in header if column not in used]:
        notes.append(f"columns not used: {', '.join(ignored)[:200]}")
    return builder.build(tuple(notes))


def _looked_at(header: tuple[str, ...], where: Sequence[Condition]) -> set[str]:
    return {*model_columns(header), *(each.column for each in where)}


def _are_alike(at: datetime | float, first: datetime | float) -> bool:
    if isinstance(at, datetime) and isinstance(first, datetime):
        return (at.tzinfo is None) == (first.tzinfo is None)
    return type(at) is type(first)


def _since(at: datetime | float, first: datetime | float) -> float:
    if isinstance(at, datetime):
        assert isinstance(first, datetime)
        return (at - first).total_seconds()
    assert isinstance(first, float)
    return at - first


def _per_second(largest: float, column: str) -> int:
    """Of numbers in `column` up to `largest`: those of Unix time are told apart by their size."""
    if column.lower().endswith("ms"):
        return 10**3
    return next((scale for least, scale in ((1e17, 10**9), (1e14, 10**6), (1e11, 10**3)) if largest >= least), 1)


def read_lengths(
    path: Path, arrivals: ArrivalProcess | None, seed: int, where: Sequence[Condition] = ()
) -> TrafficTrace:
    """Lengths in the order of the file, with arrivals drawn from `arrivals`. Raises InputError naming line, column and
    what was expected."""
    header = header_of(path)
    if not any(header):
        raise InputError(f"{path.name}: expected a trace, got an empty file", field="trace")
    names = length_columns(header)
    if names is None:
        known = " or ".join(map(",".join, LENGTHS))
        got = ascii(",".join(header)[:80])
        raise InputError(
            f"{path.name}, line 1: expected JSON lines, or columns {known} and a time such as timestamp, got {got}",
            field="row",
        )
    unknown = sorted(set(header) - set(names) - _DERIVED - _looked_at(header, where))
    builder = TraceBuilder(path.name)
    if unknown:
        times = ", ".join(TIMES)
        raise builder.wrong(1, unknown[0] or "column", f"{', '.join(names)}, and a time ({times})", unknown[0])
    if arrivals is None:
        raise InputError(
            f"{path.name}: expected --arrivals, such as poisson:2, because the file has lengths only", field="arrivals"
        )
    choice = RowChoice(path.name, where, model_columns(header))
    lengths = [
        (line, _count(builder, line, row, names[0]), _count(builder, line, row, names[1]))
        for line, row in choice.of(_rows(path, builder, header))
    ]
    times_s = arrivals.times_s(len(lengths), np.random.default_rng(seed))
    for at_s, (line, prompt, output) in zip(times_s.tolist(), lengths, strict=True):
        builder.add(line, at_s, prompt, output)
    return builder.build((*choice.notes(), f"lengths only: arrivals are {arrivals.describe()}"))


def _rows(path: Path, builder: TraceBuilder, header: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Those that are not empty."""
    if len(set(header)) < len(header):
        raise builder.wrong(1, "header", "different columns", ",".join(header))
    with _reading(path) as reader:
        next(reader, ())
        for row in reader:
            if len(row) != len(header) and row:
                raise builder.wrong(reader.line_num, "row", f"{len(header)} values", ",".join(row))
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The rows of a CSV file. Raises InputError where it is none."""
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, skipinitialspace=True)
        try:
            yield reader
        except csv.Error as error:
            raise InputError(f"{path.name}, line {reader.line_num}: expected CSV: {error}", field="row") from None


def _count(builder: TraceBuilder, line: int, row: dict[str, str], column: str) -> int:
    return _parsed(builder, line, column, row[column], _whole, "a whole number of tokens")


def _whole(text: str) -> int:
    """Also 12.0, as tables of floats have it."""
    return int(re.sub(r"\.0*$", "", text.strip()))


def _time(text: str) -> datetime | float:
    """A number, or a time of ISO 8601 with any number of fractional digits, of which datetime accepts six."""
    try:
        number = float(text)
    except ValueError:
        plain = re.sub(r"(\.\d{6})\d+", r"\1", text.strip())
        return datetime.fromisoformat(re.sub(r" UTC$", "Z", plain))
    if not abs(number) < 1e20:
        raise ValueError
    return number


def _parsed(
    builder: TraceBuilder, line: int, column: str, text: str, parse: Callable[[str], Value], expected: str
) -> Value:
    try:
        return parse(text)
    except ValueError:
        raise builder.wrong(line, column, expected, text) from None
