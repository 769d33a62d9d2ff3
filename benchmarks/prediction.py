"""Simulation compared with measurement on this machine: the demo model, four shapes, three traces, two loads.

Each shape and trace runs on a cluster of its own. First all requests arrive at once: the rate at which they are
answered is the capacity. The shares are of this measured capacity, so the load is right even if the profile is wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, play, say, spec_of
from cluster.cli.commands.planning.inputs import HardwareFlags, load_hardware
from cluster.cli.commands.planning.profile import run_profile
from cluster.profiling.profiler import Grid
from planner.compare import MetricRow, compared
from planner.hardware import Hardware, setup_of_spec
from planner.simulator.outcome import Outcome
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.config.model import DEMO_MODEL

TRACES = ("chat", "documents", "bursts")
SHAPES = ((0, 1), (1, 1), (2, 1), (1, 2))
SHARES = (0.85, 0.95)
LATENCIES = ("ttft_s.p50", "ttft_s.p95", "tpot_s.p50", "tpot_s.p95")
LATENCY_TARGET, ATTAINMENT_TARGET_POINTS = 0.05, 2.0
GRID = Grid(chunks=(16, 32, 64, 128, 256, 512), batches=(1, 2, 4, 8, 16, 32, 64), contexts=(32, 128, 512))
"""Step sizes of the traces: prompts of at most 400 tokens, batches of up to engine.max_running_requests."""
Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PredictionSizes:
    """`seconds`: approximate time of a run. `at_once_s`: of the run in which all requests arrive at once."""

    seconds: float = 36.0
    at_once_s: float = 20.0
    min_requests: int = 24
    max_requests: int = 200
    draws: int = 400  # requests drawn, of which each run takes the first
    grid: Grid = GRID


def traces(count: int) -> dict[str, TrafficTrace]:
    """Traces like conversations, questions about documents, and bursts of short questions. Lengths are scaled down to
    seconds of one core's time. One request per second."""
    chat = synthetic_trace(count, Gamma(1.0), LengthSpec(96, 0.8, 400), LengthSpec(24, 0.6, 96), seed=11)
    shared = SharedPrefixes(4, 128, 0.8)
    documents = synthetic_trace(
        count, Gamma(1.0), LengthSpec(48, 0.5, 160), LengthSpec(16, 0.5, 64), prefixes=shared, seed=12
    )
    bursts = synthetic_trace(count, Gamma(1.0, 2.0), LengthSpec(40, 0.6, 160), LengthSpec(32, 0.6, 96), seed=13)
    return dict(zip(TRACES, (chat, documents, bursts), strict=True))


def setup_for(hardware: Hardware, prefill: int, decode: int, trace: TrafficTrace) -> Setup:
    block = None if trace.prefixes is None else trace.prefixes.block_tokens
    mean = float(trace.prompt_tokens.mean())
    return setup_of_spec(spec_of(prefill, decode), hardware, mean_prompt_tokens=mean, trace_block=block)


def at_once(trace: TrafficTrace, setup: Setup, sizes: PredictionSizes) -> TrafficTrace:
    """As many requests, all arriving together, as the simulation answers in `at_once_s`."""
    count = round(sizes.at_once_s * answered_per_s(simulate(_together(trace), setup)))
    return _together(trace.head(min(sizes.max_requests, max(sizes.min_requests, count))))


def _together(trace: TrafficTrace) -> TrafficTrace:
    return replace(trace, arrival_s=np.zeros(len(trace)))


def answered_per_s(outcome: Outcome) -> float:
    """The rate of the first 90 % of answers to requests that arrived together; after that the batch runs empty. Raises
    RuntimeError if there are none."""
    if outcome.e2e_s.p90 is None:
        raise RuntimeError(f"{outcome.trace}: expected answers, got none; refusals: {outcome.refusals}")
    return 0.9 * outcome.finished / outcome.e2e_s.p90


def at_share(trace: TrafficTrace, rate: float, sizes: PredictionSizes) -> TrafficTrace:
    """The trace at `rate` requests per second, with as many requests as fit into a run."""
    count = min(sizes.max_requests, max(sizes.min_requests, round(rate * sizes.seconds)))
    return trace.at_rate(rate / trace.requests_per_s).head(count)


def objectives(trace: TrafficTrace, setup: Setup) -> Slo:
    """Objectives that 10 % of the simulated requests miss, where attainment is most sensitive."""
    found = simulate(trace, setup)
    return Slo(found.ttft_s.p90, found.tpot_s.p90)


def profiled(cost: Path, grid: Grid) -> Path:
    """Returns the file of the demo model's step times on this machine; measures them if `cost` does not exist."""
    if not cost.exists():
        run_profile(None, DEMO_MODEL, "cpu", cost, grid)
    return cost


def load_measured_hardware(cost: Path) -> Hardware:
    """The demo model on this machine, from the measurements of `tandem profile`."""
    return load_hardware(HardwareFlags(DEMO_MODEL, "cpu", str(cost), None, element_bytes=4.0, one_host=True))


class CellJournal:
    """Measurements by shape and trace, in a file if one is given, from which a later run resumes."""

    def __init__(self, path: Path | None, cost: Path, sizes: PredictionSizes) -> None:
        """Skips lines of other profiles and sizes."""
        self._path = path
        self._about = hashlib.blake2b(cost.read_bytes() + repr(sizes).encode(), digest_size=8).hexdigest()
        self._found: dict[str, Cell] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            entry = json.loads(line)
            if entry["about"] == self._about:
                self._found[entry["cell"]] = entry

    def find(self, name: str) -> Cell | None:
        return self._found.get(name)

    def add(self, name: str, cell: Cell) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"about": self._about, "cell": name} | cell) + "\n")


def prediction(
    cost: Path,
    shapes: Sequence[tuple[int, int]],
    names: Sequence[str],
    sizes: PredictionSizes,
    results: Path | None = None,
) -> Iterator[Figure]:
    """Yields figures for each shape and trace, then the worst of all."""
    hardware, cells = load_measured_hardware(profiled(cost, sizes.grid)), CellJournal(results, cost, sizes)
    drawn = traces(sizes.draws)
    found: list[Figure] = []
    for shape in shapes:
        for which in names:
            name = f"{shape[0]}:{shape[1]}_{which}"
            if (cell := cells.find(name)) is None:
                cell = asyncio.run(_measured(hardware, shape, replace(drawn[which], name=which), sizes))
                cells.add(name, cell)
            figures = list(errors(name, cell))
            yield from figures
            found += figures
    yield from worst(found)


async def _measured(hardware: Hardware, shape: tuple[int, int], drawn: TrafficTrace, sizes: PredictionSizes) -> Cell:
    """`capacity`: simulated and measured, requests per second. `runs`: both outcomes for each share of it."""
    setup = setup_for(hardware, *shape, drawn)
    together = at_once(drawn, setup, sizes)
    runs: dict[str, list[dict[str, Any]]] = {}
    async with live(spec_of(*shape)) as controller:
        measured = answered_per_s(await play(controller, together, Slo(), salt=1))
        simulated = answered_per_s(simulate(together, setup))
        say(f"{shape[0]}:{shape[1]}, {drawn.name}: {measured:.2f} requests/s, simulated {simulated:.2f}")
        for salt, share in enumerate(SHARES, 2):
            trace = at_share(drawn, share * measured, sizes)
            slo = objectives(trace, setup)
            played = await play(controller, trace, slo, salt)
            runs[f"{round(100 * share)}"] = [simulate(trace, setup, slo).to_json(), played.to_json()]
    return {"capacity": [simulated, measured], "runs": runs}


def errors(name: str, cell: Cell) -> Iterator[Figure]:
    """Errors of the simulation: of the capacity, and at each share of it."""
    simulated, measured = cell["capacity"]
    yield Figure(f"sim.capacity_error_{name}", round(abs(simulated / measured - 1), 3), "share")
    for share, (a, b) in cell["runs"].items():
        lines = {line.metric: line for line in compared(a, b)}
        for metric in (*LATENCIES, "attainment.joint"):
            say(f"  {name} at {share} %, {metric}: simulated {lines[metric].a}, measured {lines[metric].b}")
        latency = max(_error(lines, each) for each in LATENCIES)
        points = max(abs(line.points or 0.0) for line in lines.values() if line.metric.startswith("attainment"))
        yield Figure(f"sim.latency_error_{share}_{name}", round(latency, 3), "share", LATENCY_TARGET)
        yield Figure(f"sim.attainment_error_{share}_{name}", round(points, 1), "points", ATTAINMENT_TARGET_POINTS)


def worst(figures: Sequence[Figure]) -> Iterator[Figure]:
    for share in SHARES:
        for kind in ("latency", "attainment"):
            name = f"sim.{kind}_error_{round(100 * share)}"
            most = max((each for each in figures if each.figure.startswith(f"{name}_")), key=lambda each: each.value)
            ratio = None if most.reference is None else round(most.value / most.reference, 2)
            yield replace(most, figure=name, ratio=ratio)


def _error(lines: Mapping[str, MetricRow], metric: str) -> float:
    """The error of the simulated value relative to the measured one."""
    found = lines.get(metric)
    if found is None or found.a is None or not found.b:
        raise RuntimeError(f"{metric}: expected a measured value, got none")
    return abs(found.a / found.b - 1)
