"""Simulated against measured, on this machine: the demo model, four shapes, three traces, at a share of capacity."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, play, say, spec_of
from cluster.commands.planning import HardwareFlags, load_hardware
from planner.compare import Line, compared
from planner.hardware import Hardware, setup_of_spec
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import Trace
from tandem.config import DEMO_MODEL

TRACES = ("chat", "documents", "bursts")
SHAPES = ((0, 1), (1, 1), (2, 1), (1, 2))
LATENCIES = ("ttft_s.p50", "ttft_s.p95", "tpot_s.p50", "tpot_s.p95")
LATENCY_TARGET, ATTAINMENT_TARGET_POINTS = 0.05, 2.0
OVERLOADED = 4.0
_IDLE_PER_S, _MOST_PER_S, _NEAR = 0.01, 1000.0, 1.02


@dataclass(frozen=True, slots=True)
class Sizes:
    """`seconds`: about how long one run of one trace takes."""

    seconds: float = 45.0
    least_requests: int = 24
    most_requests: int = 200
    draws: int = 400  # of which a trace's capacity is found


def traces(count: int) -> dict[str, Trace]:
    """Like conversations, like documents that are asked about, and like bursts of short questions; lengths are scaled
    down to what a core computes in seconds. One request a second."""
    chat = synthetic_trace(count, Gamma(1.0), LengthSpec(96, 0.8, 400), LengthSpec(24, 0.6, 96), seed=11)
    shared = SharedPrefixes(4, 128, 0.8)
    documents = synthetic_trace(
        count, Gamma(1.0), LengthSpec(48, 0.5, 160), LengthSpec(16, 0.5, 64), prefixes=shared, seed=12
    )
    bursts = synthetic_trace(count, Gamma(1.0, 2.0), LengthSpec(40, 0.6, 160), LengthSpec(32, 0.6, 96), seed=13)
    return dict(zip(TRACES, (chat, documents, bursts), strict=True))


def fits(prefill: int, decode: int) -> bool:
    """A core for every worker, and one for the router, the agents and who asks. With fewer they take turns, which no
    cost model of a step knows of."""
    return prefill + decode < len(os.sched_getaffinity(0))


def setup_for(hardware: Hardware, prefill: int, decode: int, trace: Trace) -> Setup:
    block = None if trace.prefixes is None else trace.prefixes.block_tokens
    mean = float(trace.prompt_tokens.mean())
    return setup_of_spec(spec_of(prefill, decode), hardware, mean_prompt_tokens=mean, trace_block=block)


def capacity(trace: Trace, setup: Setup) -> float:
    """Requests per second up to which the simulated p95 of TTFT stays within OVERLOADED times that without load."""

    def ttft_s(rate: float) -> float:
        found = simulate(trace.at_rate(rate / trace.requests_per_s), setup).ttft_s.p95
        return float("inf") if found is None else found

    low, high = _IDLE_PER_S, _MOST_PER_S
    most_s = OVERLOADED * ttft_s(low)
    while high / low > _NEAR:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ttft_s(middle) <= most_s else (low, middle)
    return low


def at_share(trace: Trace, setup: Setup, share: float, sizes: Sizes) -> Trace:
    """At `share` of capacity, and as many requests as fit into a run."""
    rate = share * capacity(trace, setup)
    count = min(sizes.most_requests, max(sizes.least_requests, round(rate * sizes.seconds)))
    return trace.at_rate(rate / trace.requests_per_s).head(count)


def objectives(trace: Trace, setup: Setup) -> Slo:
    """That a tenth of the requests would miss, as simulated: there attainment tells most."""
    found = simulate(trace, setup)
    return Slo(found.ttft_s.p90, found.tpot_s.p90)


def load_measured_hardware(cost: Path) -> Hardware:
    """The demo model on this machine, as `tandem profile` measured it."""
    return load_hardware(HardwareFlags(DEMO_MODEL, "cpu", str(cost), None, element_bytes=4.0))


def prediction(
    share: float, cost: Path, shapes: Sequence[tuple[int, int]], names: Sequence[str], sizes: Sizes
) -> Iterator[Figure]:
    """One line for each run, then the worst of all. Nothing, where no shape is given."""
    if not shapes:
        say("prediction: no shape leaves a core of this machine free")
        return
    hardware = load_measured_hardware(cost)
    name = f"{round(100 * share)}"
    worst_latency, worst_points = 0.0, 0.0
    for prefill, decode in shapes:
        for which, lines in _measured(hardware, (prefill, decode), names, share, sizes):
            latency = max(abs(_line(lines, each).percent or 0.0) / 100 for each in LATENCIES)
            points = max(abs(line.points or 0.0) for line in lines.values() if line.metric.startswith("attainment"))
            worst_latency, worst_points = max(worst_latency, latency), max(worst_points, points)
            cell = f"{prefill}:{decode}_{which}"
            yield Figure(f"sim.latency_error_{name}_{cell}", round(latency, 3), "share", LATENCY_TARGET)
            yield Figure(f"sim.attainment_error_{name}_{cell}", round(points, 1), "points", ATTAINMENT_TARGET_POINTS)
    ratio = round(worst_latency / LATENCY_TARGET, 2)
    yield Figure(f"sim.latency_error_{name}", round(worst_latency, 3), "share", LATENCY_TARGET, ratio)
    ratio = round(worst_points / ATTAINMENT_TARGET_POINTS, 2)
    yield Figure(f"sim.attainment_error_{name}", round(worst_points, 1), "points", ATTAINMENT_TARGET_POINTS, ratio)


def _measured(
    hardware: Hardware, shape: tuple[int, int], names: Sequence[str], share: float, sizes: Sizes
) -> Iterator[tuple[str, Mapping[str, Line]]]:
    prefill, decode = shape
    drawn_by_name = traces(sizes.draws)
    for which in names:
        drawn = drawn_by_name[which]
        setup = setup_for(hardware, prefill, decode, drawn)
        trace = replace(at_share(drawn, setup, share, sizes), name=which)
        slo = objectives(trace, setup)
        simulated = simulate(trace, setup, slo).to_json()
        measured = asyncio.run(_run(prefill, decode, trace, slo))
        lines = {line.metric: line for line in compared(simulated, measured)}
        say(f"{prefill}:{decode}, {which}: {len(trace)} requests at {trace.requests_per_s:.2f}/s")
        for metric in (*LATENCIES, "attainment.joint"):
            line = _line(lines, metric)
            say(f"  {metric}: simulated {line.a}, measured {line.b}")
        yield which, lines


async def _run(prefill: int, decode: int, trace: Trace, slo: Slo) -> dict[str, Any]:
    async with live(spec_of(prefill, decode)) as controller:
        return (await play(controller, trace, slo, salt=1)).to_json()


def _line(lines: Mapping[str, Line], metric: str) -> Line:
    found = lines.get(metric)
    if found is None or found.a is None or found.b is None:
        raise RuntimeError(f"{metric} was not measured")
    return found
