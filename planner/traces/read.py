"""Reads any trace file, detecting its format, and spreads arrivals that the source rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.traces.arrivals import ArrivalProcess
from planner.traces.csv_files import header_of, length_columns, read_lengths, read_log, time_column
from planner.traces.jsonl import keys_of_first_line, read_mooncake, read_request_log
from planner.traces.rows import Condition
from planner.traces.servegen import read_servegen
from planner.traces.trace import TrafficTrace
from tandem.errors import InputError

LEAST_GAP_S, LEAST_GAP_SHARE = 60.0, 0.1  # shorter pauses are not worth a note
MIN_TICK_S = 0.5  # rounding to a coarser tick makes artificial bursts
_TICK_TOLERANCE = 0.01  # share of a tick, because such files round to milliseconds too


def read_trace(
    path: Path,
    *,
    arrivals: ArrivalProcess | None = None,
    seed: int = 0,
    jitter: bool = True,
    where: Sequence[Condition] = (),
) -> TrafficTrace:
    """Reads a file in one of the formats of docs/planning.md, or a folder of ServeGen clients.

    Args:
        arrivals: for files that have lengths only.
        jitter: spread arrivals that were rounded to a coarse tick over that tick.
        where: takes the rows that meet all of these conditions.

    Raises:
        InputError: names the file, and the line and column if there is one.
    """
    try:
        trace = _read(path, arrivals, seed, where)
    except OSError as error:
        raise InputError(f"{path}: expected a trace: {error.strerror}", field="trace") from None
    return jittered(trace, seed) if jitter else trace


def _read(path: Path, arrivals: ArrivalProcess | None, seed: int, where: Sequence[Condition]) -> TrafficTrace:
    trace = _recorded(path, seed, where)
    if trace is None:
        return read_lengths(path, arrivals, seed, where)
    if arrivals is not None:
        raise InputError(
            f"--arrivals: expected none, because {path.name} has times of its own: --load changes its rate",
            field="--arrivals",
        )
    return trace


def _recorded(path: Path, seed: int, where: Sequence[Condition]) -> TrafficTrace | None:
    """None if the file has no arrivals."""
    if path.is_dir():
        if where:
            raise InputError(f"--where: expected a file with rows, got the folder {path}", field="--where")
        return read_servegen(path, seed)
    with path.open("rb") as file:
        is_json = file.read(1) == b"{"
    if is_json:
        read = read_mooncake if "hash_ids" in keys_of_first_line(path) else read_request_log
        return read(path, where)
    header = header_of(path)
    return None if time_column(header) is None or length_columns(header) is None else read_log(path, where)


def tick_s(trace: TrafficTrace) -> float | None:
    """The interval of the grid on which all arrivals lie; None if it is fine or few requests share a point."""
    distinct = np.unique(trace.arrival_s)
    if len(distinct) < 2 or len(distinct) > len(trace) // 2:
        return None
    step = float(np.median(np.diff(distinct)))
    offset = np.abs(distinct / step - np.rint(distinct / step)).max()
    return step if step >= MIN_TICK_S and offset < _TICK_TOLERANCE else None


def with_gap_noted(trace: TrafficTrace) -> TrafficTrace:
    """A log may lack a part, or its machine may have stood still: means over all of the time are then too low."""
    if len(trace) < 3:
        return trace
    gaps_s = np.diff(trace.arrival_s)
    at = int(gaps_s.argmax())
    if gaps_s[at] < LEAST_GAP_S or gaps_s[at] < LEAST_GAP_SHARE * trace.span_s:
        return trace
    note = f"no request for {gaps_s[at]:,.0f} s after the first {trace.arrival_s[at]:,.0f} s"
    return replace(trace, notes=(*trace.notes, note))


def jittered(trace: TrafficTrace, seed: int) -> TrafficTrace:
    """Spreads arrivals on a coarse tick (Mooncake: about ten requests every 3 s) evenly at random within the tick, in
    their order, because rounding made those bursts."""
    tick = tick_s(trace)
    if tick is None:
        return trace
    spread = trace.arrival_s + np.random.default_rng(seed).uniform(0.0, tick, len(trace))
    spread.sort()  # ticks do not overlap, so the order of the requests stays
    note = f"arrivals were rounded to {tick:g} s: spread at random within that time"
    return replace(trace, arrival_s=spread - spread[0], notes=(*trace.notes, note))
