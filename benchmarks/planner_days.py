"""The autoscaler on recorded days: its goodput beside that of every static split of the same workers, in simulation.

Each day begins at each of a few splits, good and bad, and without prefill workers. A figure is the worst of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.handoff_figures import Figure
from planner.devices import find_device
from planner.hardware import Hardware, make_setup, simulated_block_tokens
from planner.models import find_model
from planner.simulator.result import SimResult
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.read import read_trace
from planner.traces.trace import TrafficTrace
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.router import ClassSpec, RouterSpec

WORST_TARGET, BEST_TARGET = 1.5, 0.95
WORKERS, TP = 8, 4


@dataclass(frozen=True, slots=True)
class Day:
    """`pattern`: of the trace's name. `load`: so that the best split meets the objectives for most requests, and others
    do not."""

    name: str
    pattern: str
    load: float
    slo: Slo
    seconds: float | None = None  # of the recording; None: all

    def read(self, folder: Path, requests: int | None) -> TrafficTrace | None:
        path = next(iter(sorted(folder.glob(self.pattern))), None)
        if path is None:
            return None
        trace = read_trace(path)
        trace = trace if self.seconds is None else trace.between(0.0, self.seconds)
        return (trace if requests is None else trace.head(requests)).at_rate(self.load)


DAYS = (
    Day("azure", "azure2023_conv*.csv", 6.0, Slo(1.0, 0.03)),
    Day("mooncake", "mooncake_conversation_head11500.jsonl", 1.2, Slo(5.0, 0.03)),
    Day("servegen", "servegen_*", 45.0, Slo(1.0, 0.03), 2 * 86_400.0),
)


def days(folder: Path | None, requests: int | None, processes: int) -> Iterator[Figure]:
    """`requests`: of each day; None: all."""
    worst: list[float] = []
    best: list[float] = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for day in DAYS:
            trace = None if folder is None else day.read(folder, requests)
            if trace is None:
                print(f"pools.*_static_ratio_{day.name}: omitted without its trace", file=sys.stderr)
                continue
            run = partial(_run, trace, day.slo)
            splits = range(WORKERS)
            static = list(pool.map(partial(run, scaled=False), splits))
            starts = (0, 1, WORKERS // 2, WORKERS - 1)
            scaled = list(pool.map(partial(run, scaled=True), starts))
            for split, result in [*zip(splits, static, strict=True), *zip(starts, scaled, strict=True)]:
                _describe(day, split, result)
            least = min(map(_goodput, scaled))
            # Without prefill workers, a cluster is aggregated and no split.
            worst.append(least / min(map(_goodput, static[1:])))
            best.append(least / max(map(_goodput, static)))
            yield _figure(f"pools.worst_static_ratio_{day.name}", worst[-1], WORST_TARGET)
            yield _figure(f"pools.best_static_ratio_{day.name}", best[-1], BEST_TARGET)
            hours = trace.span_s / 3600
            changes = max(len(each.role_changes) for each in scaled) / hours
            yield Figure(f"pools.role_changes_per_hour_{day.name}", round(changes, 1), "1/h", None, None)
    if worst:
        yield _figure("pools.worst_static_ratio", min(worst), WORST_TARGET)
        yield _figure("pools.best_static_ratio", min(best), BEST_TARGET)


def _run(trace: TrafficTrace, slo: Slo, prefill: int, *, scaled: bool) -> SimResult:
    return simulate(trace, replace(_setup(trace, slo, prefill), autoscaler=AutoscalerSpec(enabled=scaled)), slo)


def _setup(trace: TrafficTrace, slo: Slo, prefill: int) -> Setup:
    hardware = Hardware(find_model("llama-3-70b"), find_device("h100"))
    urgent = ClassSpec(name="interactive", ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    trace_block = None if trace.prefixes is None else trace.prefixes.block_tokens
    return make_setup(
        hardware,
        hardware.pool(prefill, TP) if prefill else None,
        hardware.pool(WORKERS - prefill, TP),
        router=RouterSpec(classes=(urgent,)),
        max_running_requests=256,
        max_step_tokens=2048,
        block_tokens=simulated_block_tokens(16, float(trace.prompt_tokens.mean()), trace_block),
    )


def _goodput(result: SimResult) -> float:
    assert result.goodput_per_s is not None
    return result.goodput_per_s


def _describe(day: Day, prefill: int, result: SimResult) -> None:
    changes = [f"{at_s:.0f} s {to}P" for at_s, to, _ in result.role_changes[:6]]
    print(
        f"{day.name} {prefill}:{WORKERS - prefill} {result.attainment.joint:.1%} {' '.join(changes)}", file=sys.stderr
    )


def _figure(name: str, value: float, target: float) -> Figure:
    return Figure(name, round(value, 3), "ratio", target, round(value / target, 3))
