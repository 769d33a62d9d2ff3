"""What plans cost beyond the cheapest layouts of a list in which every cheaper one is simulated.

Half of the traffic is recorded, if `--traces` has it; the other half is made up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.handoff_figures import Figure
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.analytic import allowed_misses
from planner.search.evaluate import Evaluation, Evaluator, Job
from planner.search.goal import Goal
from planner.search.layout import layouts
from planner.search.plan import Plan, SearchOptions, make_plan
from planner.search.race import DEARER
from planner.search.simulation_pool import Journal, SimulationPool
from planner.search.traffic import busiest
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.read import read_trace
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import TrafficTrace

REGRET_TARGET = 0.03


@dataclass(frozen=True, slots=True)
class RegretCase:
    """`trace`: of so many requests; None: it is not in the folder."""

    name: str
    trace: Callable[[int], TrafficTrace | None]
    model: str
    device: str
    slo: Slo
    max_devices: int


def cases(folder: Path | None) -> list[RegretCase]:
    def recorded(pattern: str, load: float = 1.0, rate: float | None = None) -> Callable[[int], TrafficTrace | None]:
        def read(requests: int) -> TrafficTrace | None:
            path = next(iter(sorted(folder.glob(pattern))), None) if folder is not None else None
            if path is None:
                return None
            trace = read_trace(path, arrivals=None if rate is None else Gamma(rate))
            return busiest(trace, requests).at_rate(load)

        return read

    def drawn(
        rate: float, cv: float, prompt: LengthSpec, output: LengthSpec, prefixes: SharedPrefixes | None = None
    ) -> Callable[[int], TrafficTrace | None]:
        return lambda requests: synthetic_trace(requests, Gamma(rate, cv), prompt, output, prefixes=prefixes, seed=1)

    mooncake, azure = "mooncake_conversation_head2000.jsonl", "*[aA]zure*conv*.csv"
    lengths = LengthSpec
    return [
        RegretCase("azure_70b", recorded(azure), "llama-3-70b", "h100", Slo(0.5, 0.05), 32),
        RegretCase("azure_8b", recorded(azure, load=6.0), "llama-3-8b", "a100", Slo(0.5, 0.03), 16),
        RegretCase("mooncake_70b", recorded(mooncake), "llama-3-70b", "h100", Slo(10.0, 0.05), 48),
        RegretCase("mooncake_8b", recorded(mooncake), "llama-3-8b", "h100", Slo(4.0, 0.03), 16),
        RegretCase("servegen_70b", recorded("servegen*"), "qwen2.5-72b", "h200", Slo(1.0, 0.05), 32),
        RegretCase("arxiv_8b", recorded("vidur*.csv", rate=12.0), "llama-3-8b", "a100", Slo(2.0, 0.04), 16),
        RegretCase("code_70b", drawn(6, 1.5, lengths(2000, 0.9, 7500), lengths(28, 0.9, 300)), "llama-3-70b", "h100",
                   Slo(0.5, 0.1), 32),
        RegretCase("chat_8b", drawn(60, 1.5, lengths(1200, 1.0, 14_000), lengths(200, 0.7, 1000)), "llama-3-8b", "h100",
                   Slo(0.5, 0.02), 16),
        RegretCase("bursts_8b", drawn(20, 5.0, lengths(800, 1.0, 8000), lengths(250, 0.8, 1500)), "llama-3-8b", "h100",
                   Slo(0.4, 0.015), 16),
        RegretCase("documents_70b", drawn(2, 1.0, lengths(9000, 0.8, 60_000), lengths(120, 0.8, 600)), "llama-3-70b",
                   "h100", Slo(4.0, 0.04), 64),
        RegretCase("reasoning_32b", drawn(4, 1.0, lengths(400, 0.8, 4000), lengths(1500, 0.7, 6000)), "qwen2.5-32b",
                   "h100", Slo(1.0, 0.025), 24),
        RegretCase("agents_70b", drawn(5, 2.0, lengths(3500, 0.5, 12_000), lengths(150, 0.8, 800),
                                       SharedPrefixes(20, 2048, 0.9)), "llama-3-70b", "h200", Slo(0.6, 0.04), 32),
    ]  # fmt: skip


def regrets(folder: Path | None, requests: int, most_devices: int, processes: int) -> Iterator[Figure]:
    """Of each case, the larger of what the disaggregated and the aggregated plan cost too much; then the worst."""
    found: dict[str, float] = {}
    for case in cases(folder):
        trace = case.trace(requests)
        if trace is None:
            print(f"plan.regret_{case.name}: omitted without its trace", file=sys.stderr)
        else:
            found[case.name] = _regret(case, trace, min(most_devices, case.max_devices), processes)
            yield _figure(f"plan.regret_{case.name}", found[case.name])
    yield _figure("plan.regret", max(found.values()))


def _figure(name: str, value: float) -> Figure:
    return Figure(name, round(value, 4), "share", REGRET_TARGET, round(value / REGRET_TARGET, 3))


def _regret(case: RegretCase, trace: TrafficTrace, max_devices: int, processes: int) -> float:
    hardware = Hardware(find_model(case.model), find_device(case.device))
    goal = Goal(case.slo, 0.95, max_devices)
    plan = make_plan(trace, hardware, goal, SearchOptions(len(trace), processes))
    return max(_regret_of(plan, trace, hardware, processes, is_aggregated=kind) for kind in (True, False))


def _regret_of(plan: Plan, trace: TrafficTrace, hardware: Hardware, processes: int, *, is_aggregated: bool) -> float:
    """Simulates every layout of the kind that is cheaper than the plan's; without a plan, all that it looks at."""
    goal = plan.goal
    by_kind = {kind: [each for each in plan.finalists if each.layout.is_aggregated is kind] for kind in (True, False)}
    planned, together = _cheapest(plan, by_kind[is_aggregated]), _cheapest(plan, by_kind[True])
    most = goal.max_devices
    if planned is not None:
        most = planned - 1
    elif together is not None:
        most = min(most, int(DEARER * together))
    widths = [tp for tp in hardware.widths() if tp <= most]
    listed = [each for each in layouts(widths, most, goal.step_tokens) if each.is_aggregated is is_aggregated]
    evaluator = Evaluator(trace, hardware, goal.slo, goal.max_running_requests)
    misses = allowed_misses(goal.attainment, len(trace))
    with SimulationPool(evaluator, processes, Journal(None, evaluator)) as pool:
        tried = pool.run([Job(each, len(trace), most_misses=misses) for each in listed], lambda found: None)
    best = _cheapest(plan, tried)
    if best is None:
        return 0.0
    return 1.0 if planned is None else planned / best - 1


def _cheapest(plan: Plan, found: list[Evaluation]) -> int | None:
    return min((each.layout.devices for each in found if plan.meets(each)), default=None)
