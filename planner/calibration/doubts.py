"""Why a recording cannot be calibrated with, and what to know of a calibration that it gave."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner.calibration.file import HeldOut
from planner.cost import Corrections
from planner.simulator.setup import Setup
from planner.traces.hits import cached_tokens
from planner.traces.trace import MeasuredTimes, TrafficTrace
from tandem.errors import InputError

LEAST_REQUESTS = 200  # then five of those that are held out are above p95
LEAST_ANSWERS = 100  # of several tokens
FACTORS = (0.1, 10.0)
MOST_FIXED_S = 1.0
LARGE_FIXED_S = 0.2
MOST_WAITING = 0.8  # of the median request's TTFT
MOST_UNFINISHED = 0.02
LEAST_SPREAD = 1.5  # of the times that prompts take alone, from the tenth to the ninetieth percentile
BATCHED = 2.0
LARGE_ERROR = 0.25


def measured_rows(trace: TrafficTrace) -> NDArray[np.int64]:
    """Requests with measured times. Raises InputError if they are too few."""
    if trace.measured is None:
        raise InputError(
            f"{trace.name}: expected requests with measured times (ttft_s, decode_s), got none: record them with "
            "`tandem trace record` from routers of this release, and calibrate with the recorded requests unchanged",
            field="trace",
        )
    rows = np.flatnonzero(~np.isnan(trace.measured.ttft_s + trace.measured.decode_s))
    if len(rows) < LEAST_REQUESTS:
        more = ""
        if trace.span_s > 0:
            minutes = LEAST_REQUESTS / len(rows) * trace.span_s / 60
            more = f": at this rate, record {math.ceil(minutes)} min"
        raise InputError(
            f"{trace.name}: expected at least {LEAST_REQUESTS} requests with measured times, got {len(rows)}{more}",
            field="trace",
        )
    answers = int((trace.output_tokens[rows] > 1).sum())
    if answers < LEAST_ANSWERS:
        raise InputError(
            f"{trace.name}: decode: expected at least {LEAST_ANSWERS} answers of two tokens or more to find its factor "
            f"from, got {answers}",
            field="trace",
        )
    return rows


def alone_s(trace: TrafficTrace, setup: Setup) -> NDArray[np.float64]:
    """What each prompt takes on an idle worker, less what an infinite cache holds of it."""
    cost = (setup.prefill or setup.decode).cost
    tokens, at = np.unique(np.maximum(1, trace.prompt_tokens - cached_tokens(trace)), return_inverse=True)
    found: NDArray[np.float64] = np.array([cost.prefill_s(each, 0) for each in tokens.tolist()])[at]
    return found


def tells_fixed_time(prompts_s: NDArray[np.float64]) -> bool:
    """Whether prompts differ enough to tell a time that all requests have from that of their prompts."""
    short_s, long_s = np.quantile(prompts_s, [0.1, 0.9])
    return bool(long_s >= LEAST_SPREAD * short_s)


def decode_batch(trace: TrafficTrace, measured: MeasuredTimes, rows: NDArray[np.int64], workers: int) -> float:
    """Requests that decode together on a worker, at most, for nine in ten requests."""
    start_s = (trace.arrival_s + measured.ttft_s)[rows]
    end_s = start_s + measured.decode_s[rows]
    middle_s = (start_s + end_s) / 2
    begun = np.searchsorted(np.sort(start_s), middle_s, "right")
    over = np.searchsorted(np.sort(end_s), middle_s, "left")
    return max(1.0, float(np.quantile(begun - over, 0.9)) / workers)


def check(
    found: Corrections,
    trace: TrafficTrace,
    prompts_s: NDArray[np.float64],
    after: MeasuredTimes,
    rows: NDArray[np.int64],
) -> None:
    """Raises InputError if the corrections cannot be trusted. `prompts_s`: uncorrected, of prompts alone."""
    for name, factor in (("prefill", found.prefill), ("decode", found.decode)):
        if not FACTORS[0] <= factor <= FACTORS[1]:
            bound = "at least" if factor > 1 else "at most"
            raise _wrong(
                trace, f"{name}: expected a factor from {FACTORS[0]:g} to {FACTORS[1]:g}, got {bound} {factor:.3g}",
                "check --device, --model, --cost and the spec",
            )  # fmt: skip
    if found.fixed_s > MOST_FIXED_S:
        raise _wrong(
            trace, f"fixed time: expected at most {MOST_FIXED_S:g} s before the first token, got {found.fixed_s:.2f} s",
            "something other than steps takes the time, or prefill workers are missing in the spec",
        )  # fmt: skip
    if (unfinished := float(np.isnan(after.ttft_s[rows]).mean())) > MOST_UNFINISHED:
        raise _wrong(
            trace, f"expected the simulation to finish the requests that the cluster did, got {unfinished:.0%} that it "
            "does not", "check the spec, and that the device has the memory of the real one",
        )  # fmt: skip
    assert trace.measured is not None
    own_s = found.fixed_s + found.prefill * prompts_s
    waiting = float(np.median((1 - own_s / np.maximum(trace.measured.ttft_s, 1e-9))[rows]))
    if waiting > MOST_WAITING:
        raise _wrong(
            trace, f"prefill: expected a load at which requests wait for at most {MOST_WAITING:.0%} of their TTFT, got "
            f"{waiting:.0%}: a queue multiplies every error, so the factor is not known",
            "record at a lower load, or with more workers",
        )  # fmt: skip


def _wrong(trace: TrafficTrace, what: str, remedy: str) -> InputError:
    return InputError(f"{trace.name}: {what}; {remedy}", field="trace")


def notes_on(
    trace: TrafficTrace, rows: NDArray[np.int64], batch: float, fixed_s: float | None, held_out: HeldOut
) -> Iterator[str]:
    """`fixed_s` None: it could not be told."""
    if lacking := len(trace) - len(rows):
        yield f"{lacking} of {len(trace)} requests had no measured times: simulated, but not compared"
    if batch < BATCHED:
        yield "decode: requests rarely decoded together, so its factor is known for batches of one only"
    if fixed_s is None:
        yield "fixed time: prompts are too alike to tell it from prefill, so prefill's factor contains it"
    elif fixed_s > LARGE_FIXED_S:
        yield f"fixed time: {1000 * fixed_s:.0f} ms are more than routers and networks take: workers may wait for cores"
    before = held_out.error_before
    if before is not None and held_out.error >= before:
        yield f"the corrections do not help: {before:.0%} off on average without them, {held_out.error:.0%} with them"
    elif held_out.error > LARGE_ERROR:
        yield (
            f"still {held_out.error:.0%} off on average: other loads differ by more than a factor; measure the steps "
            "with `tandem profile`"
        )
