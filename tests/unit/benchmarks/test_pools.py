"""The benchmark of pools: what it plays and how it judges, without a cluster."""

from __future__ import annotations

import pytest

from benchmarks.pool_changes import Sizes, shifting
from benchmarks.prediction import Sizes as PredictionSizes
from benchmarks.prediction import at_share, capacity, objectives, setup_for, traces
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.simulator.simulate import simulate


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device("cpu").model_copy(update={"memory_bytes": 200e9}))


def test_a_share_of_capacity_is_served_and_more_than_all_of_it_is_not(hardware: Hardware) -> None:
    trace = traces(200)["chat"]
    setup = setup_for(hardware, 1, 1, trace)
    most = capacity(trace, setup)
    below, above = (trace.at_rate(share * most / trace.requests_per_s) for share in (0.5, 3.0))
    assert len(trace) / simulate(above, setup).seconds == pytest.approx(most, rel=0.15)
    assert simulate(below, setup).seconds < 1.3 * below.span_s
    part = at_share(trace, setup, 0.85, PredictionSizes(seconds=60.0 / most))
    assert len(part) == 51
    assert part.requests_per_s == pytest.approx(0.85 * most, rel=0.5)
    slo = objectives(below, setup)
    joint = simulate(below, setup, slo).attainment
    assert joint.ttft == pytest.approx(0.9, abs=0.02)
    assert joint.tpot == pytest.approx(0.9, abs=0.02)


def test_the_shifting_workload_has_long_prompts_then_long_answers_then_both(hardware: Hardware) -> None:
    trace = shifting(hardware, Sizes(phase_s=4.0, draws=60))
    phases = [trace.between(start_s, start_s + 4.0) for start_s in (0.0, 4.0, 8.0)]
    prompts = [float(each.prompt_tokens.mean()) for each in phases]
    answers = [float(each.output_tokens.mean()) for each in phases]
    assert prompts[1] < prompts[2] < prompts[0]
    assert answers[0] < answers[2] < answers[1]
    assert (trace.arrival_s[1:] >= trace.arrival_s[:-1]).all()
