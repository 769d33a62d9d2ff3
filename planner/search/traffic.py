"""The part of a trace to simulate, and whether it is long enough."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace

_ANSWER_WEIGHT = 8  # work of an answer token in prompt tokens, to find the busiest stretch

_ANSWERS = 2.0  # in the time of a part: then as many requests run at a time as would in a longer one

BUSIEST = "the busiest"  # first words of the note about the part that was simulated


def busiest(trace: TrafficTrace, requests: int) -> TrafficTrace:
    """The stretch of `requests` requests with the most work per second."""
    if requests >= len(trace):
        return trace
    work = np.concatenate([[0.0], np.cumsum(trace.prompt_tokens + _ANSWER_WEIGHT * trace.output_tokens)])
    starts = np.arange(len(trace) - requests + 1)
    arrival_s = trace.arrival_s
    gap_s = (arrival_s[-1] - arrival_s[-requests]) / max(1, requests - 1)  # in the last stretch, and after it
    seconds = np.append(arrival_s, arrival_s[-1] + (gap_s or math.inf))[starts + requests] - arrival_s[starts]
    start = int(np.argmax((work[starts + requests] - work[starts]) / np.maximum(seconds, 1e-9)))
    part = trace.stretch(start, start + requests)
    since_s = float(arrival_s[start] - arrival_s[0])
    note = f"{BUSIEST} {requests} of {len(trace)} requests: {part.span_s:.0f} s from second {since_s:.0f}"
    return replace(part, notes=(*trace.notes, note))


def least_span_s(trace: TrafficTrace, tpot_s: float) -> float:
    """Of a part that is long enough for answers of the trace's mean length."""
    return _ANSWERS * float(trace.output_tokens.mean()) * tpot_s


def with_note_if_short(part: TrafficTrace, of: int, tpot_s: float) -> TrafficTrace:
    """`of`: requests of the whole trace. The note: answers take too long for so short a part."""
    least_s = least_span_s(part, tpot_s)
    answer_s, lacking = least_s / _ANSWERS, least_s / part.span_s
    if lacking <= 1.0:
        return part
    remedy = f"raise --simulated to {math.ceil(lacking * len(part))}" if len(part) < of else "use a longer trace"
    note = (
        f"{part.span_s:.0f} s are short for answers of up to {answer_s:.0f} s: fewer requests run at a time than in a "
        f"longer part, and the plan may be too small; {remedy}"
    )
    return replace(part, notes=(*part.notes, note))


def with_note_of_missing_classes(part: TrafficTrace, whole: TrafficTrace, slo: Slo) -> TrafficTrace:
    """The note: classes with objectives of which the part has no request. Without objectives of classes, all requests
    are judged together."""
    own = dict(slo.of_class)
    if not own:
        return part
    known, simulated = ({name for name, _ in each.with_used_labels().labels} for each in (whole, part))
    limits = {name: own.get(name, slo) for name in sorted(known - simulated)}
    lacking = [name or "default" for name, each in limits.items() if (each.ttft_s, each.tpot_s) != (None, None)]
    if not lacking:
        return part
    note = (
        f"the objectives of class {', '.join(lacking)} were not checked, because the simulated part has no such "
        "request: raise --simulated"
    )
    return replace(part, notes=(*part.notes, note))
