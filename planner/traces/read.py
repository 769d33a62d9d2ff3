"""Reads any trace file, detecting its format, and spreads arrivals that the source rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.traces.arrivals import ArrivalProcess
from planner.traces.csv_files import AZURE, header_of, read_azure, read_lengths
from planner.traces.jsonl import keys_of_first_line, read_mooncake, read_request_log
from planner.traces.servegen import read_servegen
from planner.traces.trace import TrafficTrace
from tandem.errors import InputError

MIN_TICK_S = 0.5  # rounding to a coarser tick makes artificial bursts
_TICK_TOLERANCE = 0.01  # share of a tick, because such files round to milliseconds too


def read_trace(
    path: Path, *, arrivals: ArrivalProcess | None = None, seed: int = 0, jitter: bool = True
) -> TrafficTrace:
    """Reads a file in one of the formats of docs/planning.md, or a folder of ServeGen clients.

    Args:
        arrivals: for files that have lengths only.
        jitter: spread arrivals that were rounded to a coarse tick over that tick.

    Raises:
        InputError: names the file, and the line and column if there is one.
    """
    try:
        trace = _read(path, arrivals, seed)
    except OSError as error:
        raise InputError(f"{path}: expected a trace: {error.strerror}", field="trace") from None
    return jittered(trace, seed) if jitter else trace


def _read(path: Path, arrivals: ArrivalProcess | None, seed: int) -> TrafficTrace:
    if path.is_dir():
        return read_servegen(path, seed)
    with path.open("rb") as file:
        is_json = file.read(1) == b"{"
    if is_json:
        return read_mooncake(path) if "hash_ids" in keys_of_first_line(path) else read_request_log(path)
    if header_of(path) == AZURE:
        return read_azure(path)
    return read_lengths(path, arrivals, seed)


def tick_s(trace: TrafficTrace) -> float | None:
    """The interval of the grid on which all arrivals lie; None if it is fine or few requests share a point."""
    distinct = np.unique(trace.arrival_s)
    if len(distinct) < 2 or len(distinct) > len(trace) // 2:
        return None
    step = float(np.median(np.diff(distinct)))
    offset = np.abs(distinct / step - np.rint(distinct / step)).max()
    return step if step >= MIN_TICK_S and offset < _TICK_TOLERANCE else None


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
