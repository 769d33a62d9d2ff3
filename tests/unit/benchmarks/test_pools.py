"""The benchmark of pools: what it plays and how it judges, without a cluster."""

from __future__ import annotations

import pytest

from benchmarks.pool_changes import Sizes, shifting
from benchmarks.prediction import OVERLOADED, at_share, capacity, objectives, setup_for, traces
from benchmarks.prediction import Sizes as PredictionSizes
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.simulator.simulate import simulate


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return Hardware(find_model("smollm2-135m"), find_device("cpu"))


def test_a_share_of_capacity_is_served_and_more_than_all_of_it_is_not(hardware: Hardware) -> None:
    trace = traces(50)["chat"]
    setup = setup_for(hardware, 1, 1, trace)
    most = capacity(trace, setup)
    idle, below, above = (trace.at_rate(share * most / trace.requests_per_s) for share in (0.001, 0.5, 2.0))
    p95 = [simulate(each, setup).ttft_s.p95 or 0.0 for each in (idle, below, above)]
    assert p95[0] < p95[1] < OVERLOADED * p95[0] < p95[2]
    part = at_share(trace, setup, 0.85, PredictionSizes(seconds=60.0 / most))
    assert len(part) == 50
    assert part.requests_per_s == pytest.approx(0.85 * most, rel=0.5)
    attained = simulate(below, setup, objectives(below, setup)).attainment
    assert attained.ttft == pytest.approx(0.9, abs=0.05)


def test_the_shifting_workload_has_long_prompts_then_long_answers_then_both(hardware: Hardware) -> None:
    trace = shifting(hardware, Sizes(phase_s=4.0, draws=16))
    phases = [trace.between(start_s, start_s + 4.0) for start_s in (0.0, 4.0, 8.0)]
    prompts = [float(each.prompt_tokens.mean()) for each in phases]
    answers = [float(each.output_tokens.mean()) for each in phases]
    assert prompts[1] < prompts[2] < prompts[0]
    assert answers[0] < answers[2] < answers[1]
    assert (trace.arrival_s[1:] >= trace.arrival_s[:-1]).all()
