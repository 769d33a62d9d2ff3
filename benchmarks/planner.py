"""The speed of the simulator and the search, and the quality of the plans.

    make bench-planner ARGS="--traces FOLDER"
    python -m benchmarks.planner --figure search

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `reference` is the
target, `ratio` value over target. FOLDER contains recorded traces (docs/planning.md); figures that need one are omitted
without it. docs/planning.md explains each figure.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.handoff_figures import Figure
from benchmarks.planner_days import days as day_figures
from benchmarks.planner_regret import regrets
from benchmarks.planner_silicon import figures as silicon_figures
from planner.devices import find_device
from planner.hardware import Hardware, make_setup, simulated_block_tokens
from planner.models import find_model
from planner.search.choices import plan_on_each
from planner.search.classes import classes_of
from planner.search.evaluate import router_spec
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.plan import SearchOptions
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.arrivals import Gamma
from planner.traces.hits import infinite_cache_hits
from planner.traces.read import read_trace
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import TrafficTrace

GOLDEN = {11_500: 0.3710, 2_000: 0.2941, 12_031: 0.3736}  # by number of requests; computed from the published trace
HOUR_TARGET_S, MILLION_TARGET_MIN, MILLION_TARGET_GB, SEARCH_TARGET_S = 40.0, 30.0, 4.0, 180.0


@dataclass(frozen=True, slots=True)
class PlannerSizes:
    hour_requests: int = 11_500
    million: int = 1_000_000
    million_workers: int = 2_000
    search_requests: int = 1_000
    search_devices: int = 64
    regret_requests: int = 1000
    regret_devices: int = 64
    day_requests: int | None = None  # None: all


QUICK = PlannerSizes(100, 500, 80, 60, 2, 60, 4, 200)


def golden_hits(sizes: PlannerSizes, traces: Path | None) -> Iterator[Figure]:
    for path in _mooncake(traces):
        trace = read_trace(path)
        golden = GOLDEN.get(len(trace))
        if golden is not None:
            value = round(infinite_cache_hits(trace).token_hit_rate, 4)
            yield Figure(f"sim.golden_hits_{len(trace)}", value, "share", golden, value / golden)


def hour(sizes: PlannerSizes, traces: Path | None) -> Iterator[Figure]:
    """CPU time to simulate an hour of traffic on 64 workers, 32 of each role."""
    trace = max((read_trace(path) for path in _mooncake(traces)), key=len, default=None)
    if trace is None:
        return
    trace = trace.head(sizes.hour_requests)
    setup = _setup("llama-3-70b", ClusterLayout(32, 4, 32, 4, 8192), trace)
    started_s = time.process_time()
    simulate(trace, setup, Slo(10.0, 0.05))
    seconds = time.process_time() - started_s
    yield Figure("sim.hour_64_s", round(seconds, 2), "s", HOUR_TARGET_S, round(seconds / HOUR_TARGET_S, 3))


def million(sizes: PlannerSizes, traces: Path | None) -> Iterator[Figure]:
    """A million requests. Half of the workers have each role; half of the prompts share one of 1000 prefixes."""
    half = sizes.million_workers // 2
    trace = synthetic_trace(
        sizes.million, Gamma(5.0 * half, 2.0), LengthSpec(1500, 1.0, 16_000), LengthSpec(100, 0.8, 1000),
        prefixes=SharedPrefixes(1000, 1024, 0.5),
    )  # fmt: skip
    setup = _setup("llama-3-8b", ClusterLayout(half, 1, half, 1, 8192), trace, block_tokens=256)
    started_s = time.process_time()
    simulate(trace.head(1), setup)
    empty_s = time.process_time() - started_s
    started_s = time.process_time()
    result = simulate(trace, setup, Slo(1.0, 0.05))
    seconds = time.process_time() - started_s
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    # With fewer requests, extrapolates: the setup counts once, the rest per request.
    minutes = (empty_s + (seconds - empty_s) * 1_000_000 / sizes.million) / 60
    name = "" if sizes.million == 1_000_000 else f"_from_{result.finished}"
    ratio = minutes / MILLION_TARGET_MIN
    yield Figure(f"sim.million_min{name}", round(minutes, 2), "min", MILLION_TARGET_MIN, round(ratio, 3))
    ratio = gigabytes / MILLION_TARGET_GB
    yield Figure(f"sim.million_rss_gb{name}", round(gigabytes, 2), "GiB", MILLION_TARGET_GB, round(ratio, 3))


def search(sizes: PlannerSizes, traces: Path | None) -> Iterator[Figure]:
    """Wall-clock time of a plan for up to 64 devices of three models, on all cores."""
    goal = Goal(Slo(0.5, 0.02), 0.95, sizes.search_devices)
    candidates = [Hardware(find_model("llama-3-8b"), find_device(name)) for name in ("h100", "h200", "b200")]
    options = SearchOptions(sizes.search_requests, _cores())
    started_s = time.monotonic()
    plan_on_each(_chat(sizes.search_requests, 60.0), candidates, goal, options)
    seconds = time.monotonic() - started_s
    yield Figure("plan.search_s", round(seconds, 1), "s", SEARCH_TARGET_S, round(seconds / SEARCH_TARGET_S, 3))


def regret(sizes: PlannerSizes, traces: Path | None) -> Iterator[Figure]:
    return regrets(traces, sizes.regret_requests, sizes.regret_devices, _cores())


def silicon(sizes: PlannerSizes, traces: Path | None) -> Iterator[Figure]:
    return iter(()) if sizes is QUICK else silicon_figures()  # its own test has a small table


def days(sizes: PlannerSizes, traces: Path | None) -> Iterator[Figure]:
    return day_figures(traces, sizes.day_requests, _cores())


FIGURES: dict[str, Callable[[PlannerSizes, Path | None], Iterator[Figure]]] = {
    "golden_hits": golden_hits,
    "hour": hour,
    "million": million,
    "search": search,
    "regret": regret,
    "silicon": silicon,
    "days": days,
}


def _mooncake(traces: Path | None) -> list[Path]:
    return [] if traces is None else sorted(traces.glob("mooncake_conversation*.jsonl"))


def _setup(model: str, layout: ClusterLayout, trace: TrafficTrace, block_tokens: int | None = None) -> Setup:
    hardware = Hardware(find_model(model), find_device("h100"))
    trace_block = None if trace.prefixes is None else trace.prefixes.block_tokens
    return make_setup(
        hardware,
        hardware.pool(layout.prefill_workers, layout.prefill_tp),
        hardware.pool(layout.decode_workers, layout.decode_tp),
        router=router_spec(layout, classes_of(trace.labels, Slo(), refuses=False)),
        max_running_requests=256,
        max_step_tokens=layout.step_tokens,
        block_tokens=block_tokens or simulated_block_tokens(16, float(trace.prompt_tokens.mean()), trace_block),
    )


def _chat(requests: int, rate: float) -> TrafficTrace:
    prompts, answers = LengthSpec(1200, 1.0, 14_000), LengthSpec(200, 0.7, 1000)
    return synthetic_trace(requests, Gamma(rate, 1.5), prompts, answers, seed=1)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=FIGURES, help="only these (may be repeated)")
    parser.add_argument("--traces", type=Path, help="a folder with recorded traces")
    parser.add_argument("--million", type=int, default=None, help="number of requests instead of a million")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks only that it runs")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    sizes = QUICK if options.quick else PlannerSizes(million=options.million or 1_000_000)
    for name in options.figure or FIGURES:
        for figure in FIGURES[name](sizes, options.traces):
            print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
