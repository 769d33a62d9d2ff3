"""The autoscaling policy: what it chooses in which situation, and that it comes to rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.autoscaler import (
    Autoscaler,
    MeasuredRequests,
    Objectives,
    PoolObservation,
    ScalingAction,
    ScalingDecision,
    ScalingLimits,
)
from planner.pool_forecast import Capability, LocalPrompts, ModelLoad, PoolSizes, forecast, forecasts
from router.policies.pace import BATCH_SIZES, Pace
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec
from tandem.config.router import ClassSpec, Disaggregation, PolicyName, RouterSpec

# A worker prefills 4,000 tokens/s; a token takes 20 ms alone and 40 ms in a batch of 32.
PACE = Pace(1 / 4000, 0.001, 20e-6, tuple(0.02 * (1 + batch / 32) for batch in BATCH_SIZES))
CAN = Capability(PACE, PACE, max_running_requests=64, kv_tokens=100_000)
OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.04)
LONG_PROMPTS = ModelLoad(requests_per_s=2, uncached_tokens=2600, context_tokens=2650, answer_tokens=50)
LONG_ANSWERS = ModelLoad(requests_per_s=4, uncached_tokens=100, context_tokens=600, answer_tokens=500)
LIGHT = ModelLoad(requests_per_s=1, uncached_tokens=200, context_tokens=300, answer_tokens=100)
SPEC = AutoscalerSpec(enabled=True)


def limits(least: int, most: int, *, can_change_roles: bool = True) -> ScalingLimits:
    return ScalingLimits((least, most), (1, most), (1, most), can_change_roles)


def autoscaler(limit: ScalingLimits, objectives: Objectives = OBJECTIVES, spec: AutoscalerSpec = SPEC) -> Autoscaler:
    return Autoscaler(spec, limit, objectives)


def settled(
    policy: Autoscaler, view: PoolObservation, looks: int = 2, from_s: float = 0.0, every_s: float = 2.0
) -> ScalingDecision:
    """The last of so many looks at the same."""
    return [policy.decide(view, from_s + every_s * look) for look in range(looks)][-1]


@pytest.mark.parametrize(
    ("here", "load", "limit", "action", "layout"),
    [
        # Roles first, whichever pool is short of workers.
        ((1, 2), LONG_PROMPTS, limits(3, 3), ScalingAction.CHANGE_ROLES, (2, 1)),
        ((2, 1), LONG_ANSWERS, limits(3, 3), ScalingAction.CHANGE_ROLES, (1, 2)),
        ((1, 2), LONG_PROMPTS, limits(3, 8), ScalingAction.CHANGE_ROLES, (2, 1)),
        # Where there is none to spare, or widths differ, a worker more.
        ((1, 1), LONG_PROMPTS, limits(2, 4), ScalingAction.START, (2, 1)),
        ((1, 2), LONG_PROMPTS, limits(3, 4, can_change_roles=False), ScalingAction.START, (2, 2)),
        # And where there may be none, nothing.
        ((1, 1), LONG_PROMPTS, limits(2, 2), ScalingAction.HOLD, (1, 1)),
        ((1, 2), LONG_PROMPTS, limits(3, 3, can_change_roles=False), ScalingAction.HOLD, (1, 2)),
        ((2, 1), LONG_PROMPTS, limits(3, 3), ScalingAction.HOLD, (2, 1)),
        # Far too many: one of them is stopped, but not below the limit.
        ((3, 3), LIGHT, limits(2, 6), ScalingAction.STOP, (2, 3)),
        ((3, 3), LIGHT, limits(6, 6), ScalingAction.HOLD, (3, 3)),
        ((1, 1), ModelLoad(), limits(1, 6), ScalingAction.HOLD, (1, 1)),
    ],
)
def test_what_is_chosen(
    here: tuple[int, int], load: ModelLoad, limit: ScalingLimits, action: ScalingAction, layout: tuple[int, int]
) -> None:
    view = PoolObservation(PoolSizes(*here), load, CAN)
    decision = settled(autoscaler(limit), view, looks=200)
    assert (decision.action, decision.target) == (action, PoolSizes(*layout)), decision.reason


def test_a_queue_counts_before_rates_have_shown_it() -> None:
    view = PoolObservation(PoolSizes(1, 2), replace(LIGHT, queued_tokens=20_000), CAN)
    decision = settled(autoscaler(limits(3, 3)), view)
    assert decision.target == PoolSizes(2, 1)
    assert "TTFT" in decision.reason


def test_prompts_that_idle_decode_workers_compute_need_no_further_prefill_worker() -> None:
    short_answers = ModelLoad(requests_per_s=2.2, uncached_tokens=1600, context_tokens=1604, answer_tokens=4)
    busy = replace(short_answers, answer_tokens=500, decoding_requests=20)
    for disaggregation, load, layout in (
        (Disaggregation.ALWAYS, short_answers, (2, 1)),
        (Disaggregation.AUTO, short_answers, (1, 2)),
        (Disaggregation.AUTO, busy, (2, 1)),  # they do not while others decode there
        (Disaggregation.NEVER, short_answers, (1, 2)),
    ):
        can = replace(CAN, local=LocalPrompts.of(RouterSpec(disaggregation=disaggregation)))
        decision = settled(
            autoscaler(limits(3, 3), Objectives(ttft_s=2.0)), PoolObservation(PoolSizes(1, 2), load, can)
        )
        assert decision.target == PoolSizes(*layout), (disaggregation, decision.reason)


def test_what_a_decode_worker_computes_is_missing_to_its_answers() -> None:
    alone, with_prompts = (forecast(PoolSizes(1, 2), LONG_PROMPTS, CAN, local) for local in (0.0, 0.5))
    assert with_prompts.ttft_tail_s < alone.ttft_tail_s
    assert with_prompts.tpot_s > alone.tpot_s
    assert forecast(PoolSizes(0, 3), LONG_PROMPTS, CAN, 1.0) == forecasts(PoolSizes(0, 3), LONG_PROMPTS, CAN)[0]


MIXED = ModelLoad(requests_per_s=2, uncached_tokens=3000, context_tokens=3100, answer_tokens=100)


def test_without_prefill_workers_the_time_of_prompts_is_taken_out_of_the_measured_tpot() -> None:
    """Four workers spend 6,000 of 16,000 tokens/s on prompts: a step alone took 5/8 of what was measured."""
    alone = CAN.without_prompts(PoolSizes(0, 4), MIXED)
    assert alone.decode.tpot_s == pytest.approx([each * 5 / 8 for each in PACE.tpot_s])
    assert alone.prefill == CAN.prefill
    assert CAN.without_prompts(PoolSizes(1, 3), MIXED).decode.tpot_s == pytest.approx(PACE.tpot_s)


def test_beside_prefill_workers_only_the_local_prompts_are_taken_out() -> None:
    """Two decode workers spend a quarter of 6,000 tokens/s on prompts, of 8,000 that they could: they answer in 13/16
    of their time."""
    alone = CAN.without_prompts(PoolSizes(2, 2), replace(MIXED, local_share=0.25))
    assert alone.decode.tpot_s == pytest.approx([each * 13 / 16 for each in PACE.tpot_s])
    assert CAN.without_prompts(PoolSizes(0, 4), replace(MIXED, local_share=0.25)).decode.tpot_s == pytest.approx(
        [each * 5 / 8 for each in PACE.tpot_s]
    ), "without prefill workers there is no other place for prompts"


def test_a_better_split_is_reached_over_a_worse_one() -> None:
    """One prefill worker of four is too few for these prompts; two are not, and answers are slow without any."""
    measured = replace(PACE, tpot_s=tuple(each * 8 / 5 for each in PACE.tpot_s))
    view = PoolObservation(PoolSizes(0, 4), MIXED, replace(CAN, decode=measured))
    policy = autoscaler(ScalingLimits((4, 4), (0, 4), (1, 4)), Objectives(ttft_s=6.0, tpot_s=0.025))
    decision = settled(policy, view)
    assert decision.target == PoolSizes(2, 2), decision.reason
    over, one, two = (forecasts(PoolSizes(prefill, 4 - prefill), MIXED, CAN)[0] for prefill in range(3))
    assert one.ttft_tail_s > 6.0 > two.ttft_tail_s
    assert over.tpot_s > 0.025 > two.tpot_s


def test_which_prompts_may_stay_on_a_decode_worker_is_what_the_router_is_told() -> None:
    assert LocalPrompts.of(RouterSpec()) == (32, 256, math.inf)
    assert LocalPrompts.of(RouterSpec(), bounds_steps=True) == (32, RouterSpec().max_prefill_tokens_in_flight, math.inf)
    assert LocalPrompts.of(RouterSpec(local_prefill_busy_max_tokens=0), bounds_steps=True) == (32, 32, math.inf)
    assert LocalPrompts.of(RouterSpec(policy=PolicyName.RANDOM)) == (32, 32, 32)  # it predicts nothing
    assert LocalPrompts.of(RouterSpec(local_prefill_busy_max_tokens=0)) == (32, 32, math.inf)


def test_answers_that_find_no_place_count_without_an_objective_for_tpot() -> None:
    load = ModelLoad(requests_per_s=1, uncached_tokens=10, context_tokens=2000, answer_tokens=20, decoding_requests=60)
    decision = settled(autoscaler(limits(3, 3), Objectives(ttft_s=1.0)), PoolObservation(PoolSizes(2, 1), load, CAN))
    assert decision.target == PoolSizes(1, 2)
    assert "decode places" in decision.reason


def test_several_looks_must_agree() -> None:
    policy = autoscaler(limits(3, 3), spec=AutoscalerSpec(enabled=True, confirmations=3))
    short, fine = PoolObservation(PoolSizes(1, 2), LONG_PROMPTS, CAN), PoolObservation(PoolSizes(1, 2), LIGHT, CAN)
    seen = [policy.decide(view, 2.0 * n).action for n, view in enumerate([short, short, fine, short, short, short])]
    assert seen == [ScalingAction.HOLD] * 5 + [ScalingAction.CHANGE_ROLES]


def test_a_change_is_followed_by_another_only_after_a_while() -> None:
    policy = autoscaler(limits(2, 8))
    first = settled(policy, PoolObservation(PoolSizes(1, 1), LONG_PROMPTS, CAN), from_s=100.0)
    assert first.action is ScalingAction.START
    policy.changed(first, 102.0)
    burst = PoolObservation(first.target, replace(LONG_PROMPTS, requests_per_s=8), CAN)
    waiting = settled(policy, burst, looks=5, from_s=104.0)
    assert waiting.action is ScalingAction.HOLD
    assert "waiting 50 s" in waiting.reason
    assert settled(policy, burst, from_s=162.0).action is ScalingAction.START


def test_a_worker_is_stopped_only_when_it_was_not_needed_for_long() -> None:
    policy = autoscaler(limits(2, 4), spec=AutoscalerSpec(enabled=True, stop_after_s=100))
    idle = PoolObservation(PoolSizes(2, 2), LIGHT, CAN)
    assert settled(policy, idle, looks=50).action is ScalingAction.HOLD
    policy.decide(PoolObservation(PoolSizes(2, 2), replace(LIGHT, queued_tokens=20_000), CAN), 99.0)
    assert settled(policy, idle, looks=50, from_s=100.0).action is ScalingAction.HOLD
    assert settled(policy, idle, looks=2, from_s=200.0).action is ScalingAction.STOP


def test_what_requests_missed_outweighs_a_prediction() -> None:
    load = ModelLoad(requests_per_s=2, uncached_tokens=700, context_tokens=800, answer_tokens=50)
    view = PoolObservation(PoolSizes(1, 2), load, CAN)
    assert settled(autoscaler(limits(3, 3)), view).action is ScalingAction.HOLD
    missed = replace(view, measured=MeasuredRequests(requests=20, ttft_s=None, judged=20, missed_ttft=6))
    assert settled(autoscaler(limits(3, 3)), missed).target == PoolSizes(2, 1)


def test_predictions_are_corrected_by_what_was_measured() -> None:
    load = ModelLoad(requests_per_s=2, uncached_tokens=700, context_tokens=800, answer_tokens=50)
    view = PoolObservation(PoolSizes(1, 2), load, CAN)
    predicted_s = forecast(view.sizes, load, CAN).ttft_s
    slower = replace(view, measured=MeasuredRequests(requests=20, ttft_s=3 * predicted_s))
    decision = settled(autoscaler(limits(3, 3)), slower, looks=12)
    assert decision.target == PoolSizes(2, 1), decision.reason
    as_said = replace(view, measured=MeasuredRequests(requests=20, ttft_s=predicted_s))
    assert settled(autoscaler(limits(3, 3)), as_said, looks=12).action is ScalingAction.HOLD


def test_the_objectives_are_the_strictest_of_those_that_somebody_waits_for() -> None:
    classes = [
        ClassSpec(name="chat", ttft_slo_s=2.0, tpot_slo_s=0.1),
        ClassSpec(name="code", ttft_slo_s=1.0),
        ClassSpec(name="batch", ttft_slo_s=0.1, batch=True),
    ]
    assert Objectives.of(classes) == Objectives(1.0, 0.1)


def test_without_limits_of_its_own_nothing_is_started_or_stopped() -> None:
    model = ModelSpec.model_validate({"prefill": {"workers": 2}, "decode": {"workers": 3}})
    assert ScalingLimits.of(SPEC, model) == ScalingLimits((5, 5), (1, 5), (1, 5))
    aggregated = ModelSpec.model_validate({"prefill": {"workers": 0}, "decode": {"workers": 3}})
    assert ScalingLimits.of(AutoscalerSpec(max_workers=4), aggregated) == ScalingLimits((3, 4), (0, 4), (1, 4))
    static = aggregated.model_copy(update={"engine": EngineSpec(batching="static")})
    assert ScalingLimits.of(AutoscalerSpec(max_workers=4), static) == ScalingLimits((3, 4), (0, 0), (1, 4))


loads = st.builds(
    ModelLoad,
    requests_per_s=st.floats(0, 40),
    uncached_tokens=st.floats(1, 8000),
    context_tokens=st.floats(1, 9000),
    answer_tokens=st.floats(1, 2000),
)
layouts = st.builds(PoolSizes, st.integers(1, 6), st.integers(1, 6))


def run(policy: Autoscaler, layout: PoolSizes, load: ModelLoad, looks: int, bias: float = 1.0) -> list[ScalingDecision]:
    """A cluster under one load; what waits in it grows and shrinks as the pools allow. `bias`: by what it is slower
    than it says."""
    changes, queued_tokens, every_s = [], 0.0, 20.0
    for look in range(looks):
        seen = replace(load, queued_tokens=queued_tokens)
        really = forecast(layout, replace(seen, uncached_tokens=bias * load.uncached_tokens), CAN)
        measured = MeasuredRequests(20, really.ttft_s, 20, 20 * (really.ttft_tail_s > 1.0), 20 * (really.tpot_s > 0.04))
        decision = policy.decide(PoolObservation(layout, seen, CAN, measured), every_s * look)
        if decision.action is not ScalingAction.HOLD:
            changes.append(decision)
            layout = decision.target
            policy.changed(decision, every_s * look)
        pace = layout.prefill * 4000 / bias
        queued_tokens = max(0.0, min(1e5, queued_tokens + every_s * (load.prefill_tokens_per_s - pace)))
    return changes


@given(layouts, loads, st.integers(0, 3), st.integers(0, 6), st.floats(0.7, 2.5), st.booleans())
@settings(max_examples=60)
def test_a_constant_load_never_makes_it_go_back_and_forth(
    here: PoolSizes, load: ModelLoad, fewer: int, more: int, bias: float, can_change_roles: bool
) -> None:
    limit = limits(max(2, here.workers - fewer), here.workers + more, can_change_roles=can_change_roles)
    changes = run(autoscaler(limit), here, load, looks=300, bias=bias)
    reached = [here, *(each.target for each in changes)]
    assert all(2 <= each.workers <= limit.workers[1] and min(each) >= 1 for each in reached)
    # As many as lead from one end to the other: what comes and goes would be hundreds.
    assert len(changes) <= 2 * limit.workers[1], [str(each) for each in reached]


@given(st.lists(st.sampled_from([LONG_PROMPTS, LONG_ANSWERS, LIGHT]), min_size=20, max_size=20))
@settings(max_examples=20)
def test_a_load_that_changes_faster_than_it_can_is_not_followed(changing: list[ModelLoad]) -> None:
    policy, layout, changes = autoscaler(limits(3, 3)), PoolSizes(2, 1), 0
    for look in range(200):
        decision = policy.decide(PoolObservation(layout, changing[look % len(changing)], CAN), 2.0 * look)
        if decision.action is not ScalingAction.HOLD:
            policy.changed(decision, 2.0 * look)
            layout, changes = decision.target, changes + 1
    assert changes <= 400 / SPEC.role_cooldown_s
