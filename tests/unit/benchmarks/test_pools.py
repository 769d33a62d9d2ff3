"""The benchmark of pools: what it plays and how it judges, without a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.live_cluster import spec_of
from benchmarks.pool_changes import OVERLOADED, PoolChangeSizes, capacity, shifting
from benchmarks.prediction import (
    GRID,
    CellJournal,
    PredictionSizes,
    answered_per_s,
    at_once,
    at_share,
    setup_for,
    traces,
    write_mean,
)
from benchmarks.prediction_errors import LATENCIES, Run, errors_of, figures_of, figures_of_all
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.simulator.simulate import simulate
from planner.traces.trace import MeasuredTimes


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


def test_cells_are_measured_once_for_one_size(tmp_path: Path) -> None:
    results, sizes = tmp_path / "cells.jsonl", PredictionSizes()
    CellJournal(results, (0.85,), sizes).add("float32_0:1_chat", {"capacity": 2.0})
    found = CellJournal(results, (0.85,), sizes).find("float32_0:1_chat")
    assert found is not None
    assert found["capacity"] == 2.0
    assert CellJournal(results, (0.85,), sizes).find("float32_1:1_chat") is None
    assert CellJournal(results, (0.95,), sizes).find("float32_0:1_chat") is None
    assert CellJournal(results, (0.85,), replace(sizes, seconds=1.0)).find("float32_0:1_chat") is None


def run_of(random: np.random.Generator, factor: float, noise: float) -> Run:
    """Measured times that are `factor` times the simulated ones, but for noise."""
    ttft_s, decode_s = random.gamma(4.0, 0.1, size=(2, 150))
    seen = factor * random.normal(1.0, noise)
    return Run(
        MeasuredTimes(ttft_s * seen, decode_s * seen), MeasuredTimes(ttft_s, decode_s), np.full(150, 11, np.int64)
    )


@pytest.mark.parametrize(("factor", "meets"), [(1.02, True), (1.3, False)])
def test_errors_have_the_sign_of_the_simulation_and_an_interval(factor: float, meets: bool) -> None:
    random = np.random.default_rng(1)
    found = errors_of("cell", 85, [run_of(random, factor, 0.01) for _ in range(5)], 0.01, 0.02)
    assert found.requests == 750
    for name in LATENCIES:
        assert found.of[name].value == pytest.approx(1 / factor - 1, abs=0.02)
        assert found.of[name].low < found.of[name].value < found.of[name].high
    assert found.meets("latency") is meets
    assert found.of["attainment"].value == pytest.approx(0.0 if meets else 0.3, abs=0.2)


def test_the_interval_tells_runs_that_differ_from_each_other() -> None:
    random = np.random.default_rng(2)
    alike, unlike = (
        errors_of("cell", 85, [run_of(random, 1.0, noise) for _ in range(5)], 0.0, 0.0).of["TPOT p50"]
        for noise in (0.0, 0.2)
    )
    assert unlike.high - unlike.low > 2 * (alike.high - alike.low)


def test_figures_count_the_cells_that_meet_the_targets() -> None:
    random = np.random.default_rng(3)
    cells = [
        errors_of(name, 85, [run_of(random, factor, 0.0) for _ in range(5)], 0.01, 0.02)
        for name, factor in (("a", 1.0), ("b", 1.3))
    ]
    found = {each.figure: each.value for each in figures_of_all(cells)}
    assert found["sim.latency_error_85"] == found["sim.e2e_error_85"] == 0.5
    assert found["sim.latency_error_85_worst"] == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert found["sim.drift_85"] == 0.02
    assert {each.figure: each.value for each in figures_of(cells[0])}["sim.latency_error_85_a"] < 0.01


def test_the_mean_of_two_profiles_has_the_points_of_both(tmp_path: Path) -> None:
    def written(name: str, prefill: list[list[float]], request_s: float) -> Path:
        decode = [[1, 35, 0.1], [2, 70, 0.2]]
        width = {"tp": 1, "prefill": prefill, "decode": decode, "mixed": [[16, 2, 128, 0.3]], "link": {}}
        path = tmp_path / name
        contention, fixed_work = {"decoding_beside_prompts": 1 + request_s}, {"prompts_s": request_s}
        host = {"cores": 2, "request_s": request_s, "contention": contention}
        path.write_text(json.dumps({"widths": [width], "host": host, "fixed_work": fixed_work}))
        return path

    before = written("before", [[16, 0, 1.0, 1], [64, 0, 2.0, 1]], 0.004)
    after = written("after", [[16, 0, 1.2, 1], [32, 0, 1.8, 1], [64, 0, 2.4, 1]], 0.006)
    write_mean(before, after, tmp_path / "mean")
    mean = json.loads((tmp_path / "mean").read_text())
    (width,) = mean["widths"]
    # What only the second has is scaled as the others: 1.1 / 1.2.
    assert [row[2] for row in width["prefill"]] == pytest.approx([1.1, 1.65, 2.2])
    assert width["decode"] == [[1, 35, 0.1], [2, 70, 0.2]]
    assert width["mixed"] == [[16, 2, 128, 0.3]]
    contention = {"decoding_beside_prompts": pytest.approx(1.005)}
    assert mean["fixed_work"] == {"prompts_s": pytest.approx(0.005)}
    assert mean["host"] == {"cores": 2, "request_s": pytest.approx(0.005), "contention": contention}


def test_the_shifting_workload_has_long_prompts_then_long_answers_then_both(hardware: Hardware) -> None:
    trace = shifting(hardware, PoolChangeSizes(phase_s=4.0, draws=16))
    phases = [trace.between(start_s, start_s + 4.0) for start_s in (0.0, 4.0, 8.0)]
    prompts = [float(each.prompt_tokens.mean()) for each in phases]
    answers = [float(each.output_tokens.mean()) for each in phases]
    assert prompts[1] < prompts[2] < prompts[0]
    assert answers[0] < answers[2] < answers[1]
    assert (trace.arrival_s[1:] >= trace.arrival_s[:-1]).all()
