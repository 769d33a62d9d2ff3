"""Traces in CSV: Azure's, with arrivals and lengths, and files of lengths alone, which need an arrival process."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import numpy as np

from planner.traces.arrivals import ArrivalProcess
from planner.traces.trace import TraceBuilder, TrafficTrace
from tandem.errors import InputError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
Value = TypeVar("Value")
# Names of the prompt and output columns in published files.
LENGTHS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("input_length", "output_length"),
    ("ContextTokens", "GeneratedTokens"),
)
# Vidur's other columns, which follow from these two.
_DERIVED = {"num_total_tokens", "pd_ratio"}


def header_of(path: Path) -> tuple[str, ...]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return tuple(next(csv.reader(file), ()))


def read_azure(path: Path) -> TrafficTrace:
    """Raises InputError naming line, column and what was expected."""
    builder = TraceBuilder(path.name)
    first: datetime | None = None
    for line, row in _rows(path, builder, AZURE):
        at = _time(builder, line, row["TIMESTAMP"])
        first = first or at
        arrival_s = (at - first).total_seconds()
        builder.add(
            line,
            arrival_s,
            _count(builder, line, row, "ContextTokens"),
            _count(builder, line, row, "GeneratedTokens"),
        )
    return builder.build()


def read_lengths(path: Path, arrivals: ArrivalProcess | None, seed: int) -> TrafficTrace:
    """Lengths in the order of the file, with arrivals drawn from `arrivals`. Raises InputError naming line, column and
    what was expected."""
    header = header_of(path)
    if not any(header):
        raise InputError(f"{path.name}: expected a trace, got an empty file", field="trace")
    names = next((pair for pair in LENGTHS if set(pair) <= set(header)), None)
    if names is None:
        expected = " or ".join(map(",".join, (AZURE, *LENGTHS)))
        got = ascii(",".join(header)[:80])
        raise InputError(f"{path.name}, line 1: expected JSON lines or columns {expected}, got {got}", field="row")
    if arrivals is None:
        raise InputError(
            f"{path.name}: expected --arrivals, such as poisson:2, because the file has lengths only", field="arrivals"
        )
    unknown = sorted(set(header) - set(names) - _DERIVED)
    builder = TraceBuilder(path.name)
    if unknown:
        raise builder.wrong(1, unknown[0], f"only {', '.join(names)}", unknown[0])
    lengths = [
        (line, _count(builder, line, row, names[0]), _count(builder, line, row, names[1]))
        for line, row in _rows(path, builder, header)
    ]
    times_s = arrivals.times_s(len(lengths), np.random.default_rng(seed))
    for at_s, (line, prompt, output) in zip(times_s.tolist(), lengths, strict=True):
        builder.add(line, at_s, prompt, output)
    return builder.build((f"lengths only: arrivals are {arrivals.describe()}",))


def _rows(path: Path, builder: TraceBuilder, header: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        found = tuple(next(reader, ()))
        if found != header:
            raise builder.wrong(1, "header", ",".join(header), ",".join(found))
        for row in reader:
            line = reader.line_num
            if len(row) != len(header):
                raise builder.wrong(line, "row", f"{len(header)} values", ",".join(row))
            yield line, dict(zip(header, row, strict=True))


def _count(builder: TraceBuilder, line: int, row: dict[str, str], column: str) -> int:
    return _parsed(builder, line, column, row[column], int, "a whole number of tokens")


def _time(builder: TraceBuilder, line: int, text: str) -> datetime:
    # Azure writes seven fractional digits; datetime accepts six.
    head, dot, fraction = text.partition(".")
    return _parsed(
        builder, line, "TIMESTAMP", head + dot + fraction[:6], datetime.fromisoformat, "2023-11-16 18:15:46.6805900"
    )


def _parsed(
    builder: TraceBuilder, line: int, column: str, text: str, parse: Callable[[str], Value], expected: str
) -> Value:
    try:
        return parse(text)
    except ValueError:
        raise builder.wrong(line, column, expected, text) from None
