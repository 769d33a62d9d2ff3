"""The benchmark of pools: what it plays and how it judges, without a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import prediction
from benchmarks.live_cluster import spec_of
from benchmarks.pool_changes import OVERLOADED, PoolChangeSizes, capacity, shifting
from benchmarks.prediction import (
    GRID,
    CellJournal,
    PredictionSizes,
    answered_per_s,
    at_once,
    at_share,
    errors,
    objectives,
    setup_for,
    traces,
)
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
    part = at_share(trace, 0.85 * most, PredictionSizes(seconds=60.0 / most))
    assert len(part) == 50
    assert part.requests_per_s == pytest.approx(0.85 * most, rel=0.5)
    attained = simulate(below, setup, objectives(below, setup)).attainment
    assert attained.ttft == pytest.approx(0.9, abs=0.05)


def test_what_is_answered_of_requests_that_come_at_once_is_the_rate_that_no_queue_outgrows(hardware: Hardware) -> None:
    trace = traces(400)["chat"]
    setup = setup_for(hardware, 0, 1, trace)
    together = at_once(trace, setup, PredictionSizes(at_once_s=40.0))
    most = answered_per_s(simulate(together, setup))
    assert together.span_s == 0.0
    assert len(together) == pytest.approx(40.0 * most, rel=0.2)
    below, above = (simulate(trace.at_rate(share * most / trace.requests_per_s), setup) for share in (0.7, 1.4))
    assert (below.queue_s.p95 or 0.0) < 0.2 * (above.queue_s.p95 or 0.0)


def test_the_profile_has_steps_as_large_as_the_runs_make_them() -> None:
    engine = spec_of(0, 1).models[0].engine
    assert max(GRID.batches) >= engine.max_running_requests
    for trace in traces(400).values():
        assert max(GRID.chunks) >= trace.prompt_tokens.max()
        assert min(GRID.contexts) <= trace.prompt_tokens.min() + 32
        assert max(GRID.contexts) >= (trace.prompt_tokens + trace.output_tokens).max()


def test_cells_are_measured_once_for_one_profile_and_size(tmp_path: Path) -> None:
    cost, results, sizes = tmp_path / "cost.json", tmp_path / "cells.jsonl", PredictionSizes()
    cost.write_text("{}")
    CellJournal(results, cost, sizes).add("0:1_chat", {"capacity": [1.0, 2.0], "runs": {}})
    found = CellJournal(results, cost, sizes).find("0:1_chat")
    assert found is not None
    assert found["capacity"] == [1.0, 2.0]
    assert CellJournal(results, cost, sizes).find("0:1_bursts") is None
    assert CellJournal(results, cost, replace(sizes, seconds=1.0)).find("0:1_chat") is None
    cost.write_text('{"another": "profile"}')
    assert CellJournal(results, cost, sizes).find("0:1_chat") is None


def test_errors_are_those_of_capacity_and_of_each_share_and_the_worst_of_all_comes_last(hardware: Hardware) -> None:
    trace = traces(60)["bursts"].at_rate(0.01)
    setup = setup_for(hardware, 0, 1, trace)
    slo = objectives(trace, setup)
    a = simulate(trace, setup, slo).to_json()
    slower = json.loads(json.dumps(a))
    slower["ttft_s"]["p95"] *= 1.25
    slower["attainment"]["joint"] -= 0.03
    cell = {"capacity": [3.0, 4.0], "runs": {"85": [a, slower], "95": [a, a]}}
    figures = {each.figure: each for each in errors("0:1_bursts", cell)}
    assert figures["sim.capacity_error_0:1_bursts"].value == 0.25
    assert figures["sim.latency_error_85_0:1_bursts"].value == 0.2, "relative to the measured"
    assert figures["sim.attainment_error_85_0:1_bursts"].value == 3.0
    assert figures["sim.latency_error_95_0:1_bursts"].value == 0.0
    other = [replace(each, figure=each.figure.replace("bursts", "chat"), value=0.0) for each in figures.values()]
    worst = {each.figure: (each.value, each.ratio) for each in prediction.worst([*figures.values(), *other])}
    assert worst["sim.latency_error_85"] == (0.2, 4.0)
    assert worst["sim.attainment_error_95"] == (0.0, 0.0)


def test_the_shifting_workload_has_long_prompts_then_long_answers_then_both(hardware: Hardware) -> None:
    trace = shifting(hardware, PoolChangeSizes(phase_s=4.0, draws=16))
    phases = [trace.between(start_s, start_s + 4.0) for start_s in (0.0, 4.0, 8.0)]
    prompts = [float(each.prompt_tokens.mean()) for each in phases]
    answers = [float(each.output_tokens.mean()) for each in phases]
    assert prompts[1] < prompts[2] < prompts[0]
    assert answers[0] < answers[2] < answers[1]
    assert (trace.arrival_s[1:] >= trace.arrival_s[:-1]).all()
