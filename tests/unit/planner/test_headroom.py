"""The largest load that a plan, or given devices, serve: what is found is what trying that load and the next shows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.pages.report import html_report
from planner.search.analytic import allowed_misses
from planner.search.capacity import check_growth, plan_largest_load, ttft_of, with_headroom
from planner.search.evaluate import Evaluator, Job
from planner.search.goal import Goal
from planner.search.headroom import LEAST_LOAD, PRECISION, Headroom, largest_load
from planner.search.layout import layouts
from planner.search.plan import Plan, SearchOptions, make_plan
from planner.search.simulation_pool import Journal, SimulationPool
from planner.search.trials import RESAMPLES, Trials
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError

GOAL = Goal(Slo(ttft_s=0.3, tpot_s=0.02), attainment=0.9, max_devices=2, step_tokens=(2048,), max_running_requests=128)
OPTIONS = SearchOptions(requests=100)


@cache
def hardware() -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device("h100"))


@cache
def traffic() -> TrafficTrace:
    return synthetic_trace(100, Gamma(12.0), LengthSpec(1200, 0.8, 8000), LengthSpec(60, 0.5, 300), seed=2)


@cache
def largest() -> Plan:
    return plan_largest_load(traffic(), hardware(), GOAL, OPTIONS, growth=0.05)


class Tried:
    """Loads up to a limit meet the goal."""

    def __init__(self, limit: float) -> None:
        self.limit, self.loads = limit, list[float]()

    def __call__(self, load: float) -> bool:
        self.loads.append(load)
        return load <= self.limit


class TestBisection:
    @pytest.mark.parametrize("limit", [0.0011, 0.03, 0.98, 1.0, 1.01, 1.7, 2.0, 37.0, 900.0])
    def test_the_limit_lies_between_two_loads_that_were_tried(self, limit: float) -> None:
        tried = Tried(limit)
        found = largest_load(tried, 1000.0)
        assert found is not None
        met, missed = found
        assert missed is not None
        assert met <= limit < missed <= met * (1 + PRECISION)
        assert {met, missed} <= set(tried.loads)
        assert len(tried.loads) == len(set(tried.loads)) <= 18

    def test_loads_can_be_given_as_they_are_printed(self) -> None:
        found = largest_load(lambda load: load <= 1.23456789, 1000.0)
        assert found is not None
        assert [float(f"{each:.4g}") for each in found if each is not None] == list(found)

    @pytest.mark.parametrize(("most", "tried"), [(1.0, [1.0]), (5.0004, [1.0, 2.0, 4.0, 5.0]), (4.0, [1.0, 2.0, 4.0])])
    def test_no_load_above_the_most_is_tried(self, most: float, tried: list[float]) -> None:
        meets = Tried(math.inf)
        assert largest_load(meets, most) == (tried[-1], None)
        assert meets.loads == tried

    def test_a_goal_that_the_least_load_misses_is_missed_at_once(self) -> None:
        tried = Tried(0.0)
        assert largest_load(tried, 5.0) is None
        assert tried.loads == [1.0, LEAST_LOAD]


class TestMonths:
    def found(self, limit: float, growth: float | None, span_s: float = 1000.0) -> Headroom:
        found = Headroom.measured("the plan", lambda load: load <= limit, span_s, 0.5, growth)
        assert found is not None
        return found

    def test_growth_is_by_month_and_of_the_month_before(self) -> None:
        found = self.found(1.5, 0.05)
        assert found.months is not None
        assert 1.05**found.months == pytest.approx(found.load)
        (*_, line) = found.lines((), 1.0)
        assert line == f"traffic that grows by 5 % a month reaches it after {found.months:.1f} months"

    def test_without_growth_there_are_no_months(self) -> None:
        found = self.found(1.5, None)
        assert found.months is None
        assert not any("month" in line for line in found.lines((), 1.0))

    def test_traffic_that_is_too_much_already_lasts_for_no_month(self) -> None:
        found = self.found(0.5, 0.05)
        assert found.months == 0.0
        assert list(found.lines((), 1.0))[-1] == "the traffic is beyond that load already"

    def test_a_part_as_short_as_the_objective_shows_no_limit(self) -> None:
        found = self.found(math.inf, 0.05, span_s=2.0)
        assert (found.load, found.missed_at, found.unseen) == (4.0, None, 1.0)
        lines = list(found.lines((), 1.0))
        assert lines[1] == "no larger load was tried: all simulated requests would arrive within one TTFT objective"
        assert lines[-1].endswith(f"reaches it after at least {found.months:.1f} months")

    def test_a_short_part_is_told_with_the_overload_that_it_hides(self) -> None:
        assert not any("short" in line for line in self.found(1.5, None).lines((), 1.0))
        hides = [line for line in self.found(2.0, None, span_s=20.0).lines((), 1.0) if "short" in line]
        assert hides == ["the simulated part is short: an overload of 5% may not show in it; raise --simulated"]


class TestDevices:
    def test_the_load_is_met_by_the_plan_and_the_next_by_no_layout(self) -> None:
        plan, found = largest(), largest().headroom
        assert plan.chosen is not None
        assert found is not None
        assert found.missed_at is not None
        assert plan.load == found.load > 1.0
        assert plan.chosen.layout.devices <= GOAL.max_devices
        evaluator = Evaluator(traffic(), hardware(), GOAL.slo, GOAL.max_running_requests)
        alone = evaluator.evaluate(Job(plan.chosen.layout, 100, load=found.load))
        assert alone.joint == plan.chosen.joint >= GOAL.attainment
        most = allowed_misses(GOAL.attainment, 100)
        for layout in layouts(hardware().widths()[:2], GOAL.max_devices, GOAL.step_tokens):
            next_load = evaluator.evaluate(Job(layout, 100, load=found.missed_at, most_misses=most))
            assert not next_load.meets(GOAL.attainment), layout

    @pytest.mark.slow
    def test_it_is_the_plan_of_a_trace_at_that_load(self) -> None:
        plan = largest()
        again = make_plan(traffic().at_rate(plan.load), hardware(), GOAL, OPTIONS)
        assert plan.chosen is not None
        assert again.chosen is not None
        assert again.chosen.layout == plan.chosen.layout
        assert again.chosen.joint == plan.chosen.joint
        assert [each.evaluation and each.evaluation.joint for each in again.variants] == [
            each.evaluation and each.evaluation.joint for each in plan.variants
        ]
        assert (again.requests_per_s, again.traffic) == (plan.requests_per_s, plan.traffic)
        assert [each.per_million_tokens for each in again.costs] == [each.per_million_tokens for each in plan.costs]

    def test_it_says_what_that_load_is(self) -> None:
        plan, found = largest(), largest().headroom
        assert found is not None
        whole = plan.costs[0]
        tokens = float(traffic().prompt_tokens.sum() + traffic().output_tokens.sum())
        assert whole.requests_per_s == pytest.approx(traffic().requests_per_s * found.load)
        assert whole.tokens_per_s == pytest.approx(tokens / traffic().span_s * found.load)
        first, second, *_, last = plan.headroom_lines()
        assert first == (
            f"largest load for up to 2 x h100: x {found.load:g}, {whole.requests_per_s:.2f} requests/s and "
            f"{whole.tokens_per_s:,.0f} tokens/s in the whole trace"
        )
        assert second.startswith(f"at load x {found.missed_at:g} the goal is missed; it is assumed")
        assert "grows by 5 % a month" in last
        page = html_report(plan, "roofline")
        assert all(f"<p>{line}.</p>" in page for line in plan.headroom_lines())

    def test_a_goal_that_no_load_meets_says_what_binds(self) -> None:
        found = plan_largest_load(traffic(), hardware(), replace(GOAL, slo=Slo(0.001)), OPTIONS)
        assert (found.headroom, found.chosen, found.headroom_lines()) == (None, None, [])
        assert found.load == LEAST_LOAD
        assert found.miss is not None
        assert found.miss.limit == "prefill_time"


class TestPlan:
    def test_the_chosen_layout_meets_that_load_and_not_the_next(self) -> None:
        plan = with_headroom(make_plan(traffic(), hardware(), GOAL, OPTIONS), traffic(), hardware(), OPTIONS, 0.05)
        assert plan.chosen is not None
        assert plan.headroom is not None
        assert plan.headroom.missed_at is not None
        assert plan.load == 1.0
        evaluator = Evaluator(traffic(), hardware(), GOAL.slo, GOAL.max_running_requests)
        met, missed = (
            evaluator.evaluate(Job(plan.chosen.layout, 100, load=load)).meets(GOAL.attainment)
            for load in (plan.headroom.load, plan.headroom.missed_at)
        )
        assert (met, missed) == (True, False)
        rate = traffic().requests_per_s * plan.headroom.load
        assert plan.headroom_lines()[0].startswith(
            f"largest load for the plan: x {plan.headroom.load:g}, {rate:.2f} requests/s"
        )

    @pytest.mark.slow
    def test_one_that_must_be_sure_lasts_no_longer(self) -> None:
        sure = replace(GOAL, confidence=0.9)
        plan = make_plan(traffic(), hardware(), sure, OPTIONS)
        found = with_headroom(plan, traffic(), hardware(), OPTIONS, 0.05)
        hopeful = with_headroom(replace(plan, goal=GOAL), traffic(), hardware(), OPTIONS, 0.05)
        assert found.headroom is not None
        assert hopeful.headroom is not None
        assert 1.0 <= found.headroom.load < hopeful.headroom.load

    def test_none_lasts_for_no_time(self) -> None:
        nothing = make_plan(traffic(), hardware(), replace(GOAL, slo=Slo(0.001)), OPTIONS)
        assert with_headroom(nothing, traffic(), hardware(), OPTIONS, 0.05) == nothing


def test_resampled_traces_are_simulated_at_the_load_of_each_result() -> None:
    evaluator = Evaluator(traffic(), hardware(), GOAL.slo)
    layout = next(layouts([1], 1, (2048,)))
    with SimulationPool(evaluator, 1, Journal(None, evaluator)) as pool:
        trials = Trials(pool, GOAL, lambda layout: layout.devices, lambda what, done, total: None)
        idle, busy = (trials.resampled(evaluator.evaluate(Job(layout, 100, load=load))) for load in (0.1, 3.0))
    assert (idle.met, busy.met) == (RESAMPLES, 0)


@pytest.mark.parametrize("growth", [0.0, -0.1, 5.0, math.nan, math.inf])
def test_growth_is_a_share(growth: float) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.05 for 5 % a month, got"):
        check_growth(growth, GOAL)


def test_without_an_objective_for_the_first_token_any_load_is_served() -> None:
    with pytest.raises(ConfigError, match=r"--max-load: expected --ttft with it: .* any load meets the goal"):
        ttft_of(replace(GOAL, slo=Slo(tpot_s=0.02)), "--max-load")
