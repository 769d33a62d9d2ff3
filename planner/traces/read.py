"""Any trace file, by what it looks like; and what is done to arrivals that a source rounded."""

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

MIN_TICK_S = 0.5  # coarser than this, rounding makes bursts that nobody sent
_TICK_TOLERANCE = 0.01  # of a tick: such files round to milliseconds as well


def read_trace(
    path: Path, *, arrivals: ArrivalProcess | None = None, seed: int = 0, jitter: bool = True
) -> TrafficTrace:
    """A file of one of the formats in docs/planning.md, or a folder of ServeGen clients.

    Args:
        arrivals: for files that say lengths only.
        jitter: spread arrivals that were rounded to a coarse tick over that tick.

    Raises:
        InputError: names the file, and line and column where it is one.
    """
    try:
        trace = _read(path, arrivals, seed)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: expected a trace", field="trace") from None
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
    """The grid that all arrivals lie on, when it is coarse and requests share its points; else None."""
    distinct = np.unique(trace.arrival_s)
    if len(distinct) < 2 or len(distinct) > len(trace) // 2:
        return None
    step = float(np.median(np.diff(distinct)))
    offset = np.abs(distinct / step - np.rint(distinct / step)).max()
    return step if step >= MIN_TICK_S and offset < _TICK_TOLERANCE else None


def jittered(trace: TrafficTrace, seed: int) -> TrafficTrace:
    """Arrivals on a coarse tick (Mooncake's lie 3 s apart, ten at once) are spread evenly at random within it, in their
    order: the bursts are the rounding's, not the users'."""
    tick = tick_s(trace)
    if tick is None:
        return trace
    spread = trace.arrival_s + np.random.default_rng(seed).uniform(0.0, tick, len(trace))
    spread.sort()  # within a tick; ticks do not overlap, so no request changes its place
    note = f"arrivals were rounded to {tick:g} s: spread at random within it"
    return replace(trace, arrival_s=spread - spread[0], notes=(*trace.notes, note))
