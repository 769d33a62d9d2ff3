"""ServeGen clients (alibaba/ServeGen): a folder of `*-trace.csv` (rates by window) and `*-dataset.json` (lengths).

The files contain distributions, not requests, so the requests are drawn. A client's windows give rate, burstiness and
family of intervals; lengths come from the distribution of the 6-hour window.
"""

from __future__ import annotations

import ast
import csv
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.traces.trace import TrafficTrace, in_order
from tandem.errors import InputError

FAMILIES = ("Gamma", "Weibull")
_LAST_WINDOW_S = 600.0
_MOST_DRAWN = 1 << 20  # intervals of a window, or 64 times as many as it has on average


@dataclass(frozen=True, slots=True)
class Window:
    """`shape` and `scale`: parameters of the interval distribution, in seconds."""

    start_s: float
    end_s: float
    requests_per_s: float
    family: str
    shape: float
    scale: float


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Values with probabilities that sum to 1."""

    values: NDArray[np.int64]
    chances: NDArray[np.float64]

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        return random.choice(self.values, count, p=self.chances)


@dataclass(frozen=True, slots=True)
class ServegenClient:
    windows: tuple[Window, ...]
    lengths: tuple[tuple[float, LengthDistribution, LengthDistribution], ...]  # start in seconds; prompt, output

    def lengths_at(self, at_s: float) -> tuple[LengthDistribution, LengthDistribution]:
        known = [entry for entry in self.lengths if entry[0] <= at_s] or list(self.lengths[:1])
        return known[-1][1:]


def read_servegen(folder: Path, seed: int) -> TrafficTrace:
    """Draws the traffic of all clients of a folder.

    Raises InputError naming file, line, column and what was expected.
    """
    names = sorted(folder.glob("*-trace.csv"))
    if not names:
        raise InputError(f"{folder}: expected ServeGen's *-trace.csv files, found none", field="trace")
    random = np.random.default_rng(seed)
    arrivals, prompts, outputs, owners = [], [], [], []
    for number, path in enumerate(names):
        client = read_client(path, path.with_name(path.name.removesuffix("trace.csv") + "dataset.json"))
        for window in client.windows:
            times_s = _draw(window, random)
            prompt, output = client.lengths_at(window.start_s)
            arrivals.append(times_s)
            prompts.append(prompt.draw(len(times_s), random))
            outputs.append(output.draw(len(times_s), random))
            owners.append(np.full(len(times_s), number, np.int32))
    arrival_s = np.concatenate([*arrivals, np.empty(0)])
    if not len(arrival_s):
        raise InputError(f"{folder}: expected rates above 0, got none that yields a request", field="trace")
    trace = TrafficTrace(
        folder.name,
        arrival_s,
        np.maximum(1, np.concatenate(prompts)),
        np.maximum(1, np.concatenate(outputs)),
        labels=tuple(("", path.name.removesuffix("-trace.csv")) for path in names),
        label=np.concatenate(owners),
        notes=(f"drawn from {len(names)} ServeGen clients, seed {seed}",),
    )
    trace = in_order(trace)
    trace.arrival_s[:] -= trace.arrival_s[0]
    return trace


def read_client(trace_csv: Path, dataset: Path) -> ServegenClient:
    rows = []
    with trace_csv.open(encoding="utf-8", newline="") as file:
        for line, row in enumerate(csv.reader(file), start=1):
            rows.append(_row(trace_csv.name, line, row))
    for line, (before, after) in enumerate(pairwise(rows), start=2):
        if after[0] <= before[0]:
            raise _wrong(trace_csv.name, line, "window start", f"more than {before[0]:g}: sort the trace", after[0])
    ends_s = [row[0] for row in rows[1:]] + [rows[-1][0] + _LAST_WINDOW_S if rows else 0.0]
    windows = tuple(
        Window(start_s, end_s, rate, family, shape, scale)
        for (start_s, rate, family, shape, scale), end_s in zip(rows, ends_s, strict=True)
        if rate > 0
    )
    return ServegenClient(windows, _read_lengths(dataset))


def _row(name: str, line: int, row: list[str]) -> tuple[float, float, str, float, float]:
    columns = ("window start", "rate", "cv", "family", "first parameter", "second parameter")
    if len(row) != len(columns):
        raise _wrong(name, line, "row", f"{len(columns)} values ({', '.join(columns)})", ",".join(row))
    numbers = {}
    for column, text in zip(columns, row, strict=True):
        if column != "family":
            numbers[column] = _number(name, line, column, text or "0")
    if numbers["rate"] > 0 and row[3] not in FAMILIES:
        raise _wrong(name, line, "family", " or ".join(FAMILIES), row[3])
    return numbers["window start"], numbers["rate"], row[3], numbers["first parameter"], numbers["second parameter"]


def _number(name: str, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise _wrong(name, line, column, "a number of at least 0", text)
    return value


def _read_lengths(dataset: Path) -> tuple[tuple[float, LengthDistribution, LengthDistribution], ...]:
    try:
        windows = json.loads(dataset.read_text(encoding="utf-8"))
        found = []
        for start, entry in sorted(windows.items(), key=lambda pair: float(pair[0])):
            prompt, output = (_lengths(entry[column]) for column in ("input_tokens", "output_tokens"))
            if prompt is not None and output is not None:
                found.append((float(start), prompt, output))
    except OSError as error:
        raise InputError(
            f"{dataset.name}: expected this file beside the trace: {error.strerror}", field="trace"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        expected = 'expected {"WINDOW START": {"input_tokens": {tokens: chance}, "output_tokens": {...}}}'
        raise InputError(f"{dataset.name}: {expected}: {error}", field="trace") from None
    if not found:
        raise InputError(f"{dataset.name}: expected a distribution of lengths, got only empty ones", field="trace")
    return tuple(found)


def _lengths(text: str) -> LengthDistribution | None:
    """Parses a distribution, which ServeGen writes as the text of a Python dict."""
    chances = ast.literal_eval(text)
    if not chances:
        return None
    values, weights = np.array(list(chances), np.int64), np.array(list(chances.values()), np.float64)
    if values.min() < 0 or weights.min() < 0 or not weights.sum() > 0:
        raise ValueError("expected lengths and probabilities of at least 0")
    return LengthDistribution(values, weights / weights.sum())


def _draw(window: Window, random: np.random.Generator) -> NDArray[np.float64]:
    """Draws the arrivals of one window. The file's rate gives the mean interval, its parameters the shape."""
    mean = int((window.end_s - window.start_s) * window.requests_per_s)
    count = mean + 10 * math.isqrt(mean + 1) + 10
    times_s = window.start_s + np.cumsum(_intervals(window, count, random)) / window.requests_per_s
    most = max(_MOST_DRAWN, 64 * count)
    while times_s[-1] < window.end_s and len(times_s) < most:  # most intervals of great bursts take no time
        more = np.cumsum(_intervals(window, len(times_s), random)) / window.requests_per_s
        times_s = np.concatenate([times_s, times_s[-1] + more])
    drawn: NDArray[np.float64] = times_s[times_s < window.end_s]
    return drawn


def _intervals(window: Window, count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """With a mean of 1."""
    shape = window.shape if window.shape > 0 else 1.0
    if window.family == "Gamma":
        return random.gamma(shape, 1.0 / shape, count)
    return random.weibull(shape, count) / math.gamma(1 + 1 / shape)


def _wrong(name: str, line: int, column: str, expected: str, got: object) -> InputError:
    return InputError(f"{name}, line {line}, {column}: expected {expected}, got {str(got)[:60]!r}", field=column)
