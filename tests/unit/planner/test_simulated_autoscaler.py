"""The autoscaler in the simulator: pools that follow a load that shifts."""

from __future__ import annotations

import numpy as np
import pytest

from planner.autoscaler import Autoscaler, PoolObservation, ScalingDecision
from planner.cost import RooflineCostModel
from planner.shapes import DeviceShape, LinkShape, ModelShape
from planner.simulator.autoscaling import WINDOW_S
from planner.simulator.result import SimResult
from planner.simulator.setup import PoolSetup, Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.trace import TrafficTrace
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.router import ClassSpec, RouterSpec

PHASE_S = 40.0
SLO = Slo(ttft_s=2.0, tpot_s=0.06)
# Prefills about 4,000 tokens/s, decodes at 25 ms alone: an old GPU with a small model.
COST = RooflineCostModel(
    ModelShape(layers=24, heads=16, kv_heads=8, head_dim=128, block_params=2_000_000_000, head_params=0),
    DeviceShape(flops_per_s=20e12, memory_bytes_per_s=200e9),
    LinkShape(bytes_per_s=10e9),
)


def shifting(seed: int) -> TrafficTrace:
    """Long prompts, then long answers, then long prompts again."""
    random = np.random.default_rng(seed)
    parts = []
    for phase, (rate, prompt, output) in enumerate([(3.2, 2000, 30), (10.0, 60, 300), (3.2, 2000, 30)]):
        count = random.poisson(rate * PHASE_S)
        at_s = np.sort(random.uniform(phase * PHASE_S, (phase + 1) * PHASE_S, count))
        parts.append((at_s, random.poisson(prompt, count), 1 + random.poisson(output, count)))
    arrival_s, prompts, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
    return TrafficTrace("shifting", arrival_s - arrival_s[0], prompts, outputs)


def run(
    prefill: int, decode: int, *, autoscale: bool = False, slo: Slo = SLO, trace: TrafficTrace | None = None
) -> SimResult:
    classes = (ClassSpec(name="interactive", ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s),)
    setup = Setup(
        PoolSetup(prefill, 1, COST, 60_000) if prefill else None,
        PoolSetup(decode, 1, COST, 60_000),
        24,
        COST.model.kv_heads,
        COST.model.kv_token_bytes,
        router=RouterSpec(classes=classes),
        autoscaler=AutoscalerSpec(enabled=autoscale),
    )
    return simulate(shifting(1) if trace is None else trace, setup, slo)


def goodput(result: SimResult) -> float:
    assert result.goodput_per_s is not None
    return result.goodput_per_s


def test_pools_that_follow_the_load_do_better_than_the_best_that_do_not() -> None:
    scaled = run(2, 1, autoscale=True)
    assert goodput(scaled) >= 1.02 * goodput(run(1, 2)), scaled.role_changes
    assert [layout for _, *layout in scaled.role_changes] == [[1, 2], [2, 1]]
    followed_s = [at_s - PHASE_S * (phase + 1) for phase, (at_s, _, _) in enumerate(scaled.role_changes)]
    assert all(0 < each <= 15 for each in followed_s), followed_s
    assert scaled.finished + scaled.rejected == scaled.requests


def steady(rate: float, prompt: int, output: int, count: int) -> TrafficTrace:
    random = np.random.default_rng(3)
    at_s = np.cumsum(random.exponential(1 / rate, count))
    return TrafficTrace("steady", at_s - at_s[0], random.poisson(prompt, count), 1 + random.poisson(output, count))


def test_an_aggregated_cluster_gets_prefill_workers_when_answers_are_too_slow() -> None:
    """With one of four workers for prompts, they would wait too long; with two, answers keep their pace."""
    slo, trace = Slo(ttft_s=6.0, tpot_s=0.035), steady(3.0, 2200, 150, 400)
    alone, scaled = (run(0, 4, autoscale=autoscale, slo=slo, trace=trace) for autoscale in (False, True))
    assert [layout for _, *layout in scaled.role_changes][:1] == [[2, 2]], scaled.role_changes
    assert goodput(scaled) >= 1.2 * max(goodput(alone), goodput(run(1, 3, slo=slo, trace=trace)))
    assert scaled.pools.keys() == {"prefill", "decode"}


def test_what_the_router_refuses_counts_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in production: those that it takes meet their objective, because it refuses the others."""
    seen: list[PoolObservation] = []
    decide = Autoscaler.decide

    def looking(policy: Autoscaler, view: PoolObservation, now_s: float) -> ScalingDecision:
        seen.append(view)
        return decide(policy, view, now_s)

    monkeypatch.setattr(Autoscaler, "decide", looking)
    result = run(1, 1, autoscale=True, slo=Slo(ttft_s=1.5), trace=steady(4.0, 1500, 10, 500))
    late = result.finished - (result.attainment.ttft or 0.0) * result.requests
    assert result.rejected > 50 > 5 > late
    missed = sum(each.measured.missed_ttft for each in seen) / (WINDOW_S / AutoscalerSpec().interval_s)
    assert missed == pytest.approx(result.rejected, rel=0.3)
