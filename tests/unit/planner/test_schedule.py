"""The sizes of a plan's pools over time: each part is served by what its schedule says, and quiet parts by less."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.pages.report import html_report
from planner.search.capacity import may_replace, with_schedule
from planner.search.evaluate import Evaluator, Job
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.machines import MachineKind, MachineKinds
from planner.search.plan import Plan, SearchOptions, make_plan
from planner.search.schedule import Schedule, check_parts, clock, is_smaller, least_of, slots_of
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError
from tandem.text.words import plural

GOAL = Goal(Slo(ttft_s=0.3, tpot_s=0.02), attainment=0.9, max_devices=6, step_tokens=(2048,), max_running_requests=128)
OPTIONS = SearchOptions(requests=200)
PARTS = 3


@cache
def hardware() -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device("h100"))


@cache
def traffic() -> TrafficTrace:
    """A busy third, a quiet one in which a single request comes, and one between."""
    drawn = synthetic_trace(500, Gamma(1.0), LengthSpec(1200, 0.8, 8000), LengthSpec(60, 0.5, 300), seed=2)
    busy, some = np.linspace(0.0, 9.9, 380), np.linspace(20.5, 30.0, 119)
    return drawn.rows(np.arange(500), np.concatenate([busy, [15.0], some]))


@cache
def planned() -> Plan:
    plan = make_plan(traffic(), hardware(), GOAL, OPTIONS)
    return with_schedule(plan, traffic(), hardware(), OPTIONS, PARTS)


def found() -> Schedule:
    schedule = planned().schedule
    assert schedule is not None
    return schedule


def test_parts_are_equal_in_time_and_have_each_request_once() -> None:
    slots = [*slots_of(traffic(), PARTS)]
    assert [each.requests for each in slots] == [380, 1, 119]
    assert [each.start_s for each in slots] == pytest.approx([0.0, 10.0, 20.0], abs=0.01)
    assert slots[-1].end_s == traffic().span_s
    assert slots[1].traffic is None
    assert [len(each.traffic) for each in slots if each.traffic is not None] == [380, 119]


def test_quiet_parts_need_less_and_each_part_meets_the_goal_with_its_size() -> None:
    plan, (busy, quiet, some) = planned(), found().parts
    assert plan.chosen is not None
    assert busy.layout.devices > some.layout.devices >= quiet.layout.devices
    assert quiet.layout == least_of(plan.chosen.layout)
    assert (quiet.joint, quiet.meets) == (None, True)
    for part, slot in zip((busy, quiet, some), slots_of(traffic(), PARTS), strict=True):
        assert is_smaller(part.layout, plan.chosen.layout)
        if slot.traffic is not None:
            evaluator = Evaluator(slot.traffic, hardware(), GOAL.slo, GOAL.max_running_requests)
            again = evaluator.evaluate(Job(part.layout, min(OPTIONS.requests, len(slot.traffic))))
            assert again.joint == part.joint
            assert again.meets(GOAL.attainment)


def test_what_is_saved_is_of_whole_machines_and_told() -> None:
    plan, schedule = planned(), found()
    deployed = [plan.deployed(each.layout) for each in schedule.parts]
    assert schedule.devices == pytest.approx(sum(each.devices for each in deployed) / PARTS)
    assert schedule.per_hour == pytest.approx(sum(each.per_hour for each in deployed) / PARTS)
    assert plan.chosen is not None
    assert schedule.fixed_per_hour == plan.deployed(plan.chosen.layout).per_hour > schedule.per_hour
    first, last = schedule.lines()
    assert first.startswith(f"by this schedule {schedule.devices:.1f} instead of {schedule.fixed_devices} devices")
    assert first.endswith(f"per hour; {plural(schedule.changes, 'change')}")
    assert last.startswith("each part is simulated alone")
    page = html_report(plan, "test")
    assert "The plan's pools over time" in page or "The plan&#x27;s pools over time" in page
    assert f"<p>{first}.</p>" in page
    parts = plan.to_json()["schedule"]["parts"]
    assert [each["deployed"]["devices"] for each in parts] == [each.devices for each in deployed]
    assert parts[0]["requests_per_s"] == pytest.approx(38, abs=0.1)


def test_without_a_plan_there_is_no_schedule() -> None:
    hopeless = Goal(Slo(ttft_s=1e-6), max_devices=1, step_tokens=(2048,))
    plan = with_schedule(make_plan(traffic(), hardware(), hopeless, OPTIONS), traffic(), hardware(), OPTIONS, PARTS)
    assert (plan.chosen, plan.schedule) == (None, None)


@pytest.mark.parametrize(("parts", "said"), [(1, "from 2 to 288"), (289, "from 2 to 288"), (20, "got 500 in 20 parts")])
def test_parts_that_say_nothing_are_refused(parts: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--schedule: .*{said}"):
        check_parts(parts, traffic(), GOAL.slo.tpot_s)


def test_parts_shorter_than_two_answers_are_refused() -> None:
    """Otherwise the answers of no part would make room for others, and one worker would look enough."""
    answer_s = traffic().output_tokens.mean() * 0.09
    assert traffic().span_s / 4 < 2 * answer_s < traffic().span_s / 2
    check_parts(2, traffic(), 0.09)
    with pytest.raises(ConfigError, match=f"parts of at least {2 * answer_s:.3g} s, .* got 7.5 s"):
        check_parts(4, traffic(), 0.09)


def at_times(*times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> TrafficTrace:
    """Of the usual requests, at these times of 30 s."""
    arrivals = np.concatenate(times)
    return traffic().rows(np.arange(len(arrivals)), arrivals)


def test_a_part_whose_requests_come_at_one_time_keeps_the_whole_plan() -> None:
    """So does one whose busiest stretch is such a burst: neither has a rate."""
    busy, burst = np.linspace(0.0, 9.9, 200), np.full(OPTIONS.requests, 15.0)
    for more in (np.array([]), np.array([19.0])):
        trace = at_times(busy, burst, more, np.linspace(20.5, 30.0, 60))
        plan = with_schedule(planned(), trace, hardware(), OPTIONS, PARTS)
        assert plan.schedule is not None
        assert plan.chosen is not None
        bursting = plan.schedule.parts[1]
        assert (bursting.layout, bursting.joint, bursting.meets) == (plan.chosen.layout, None, True)


def test_a_part_that_nothing_serves_gets_the_least_that_serves_as_many() -> None:
    few = at_times(np.linspace(0.0, 9.9, 200), np.array([12.0, 14.0, 16.0, 18.0]), np.linspace(20.5, 30.0, 60))
    prompts = few.prompt_tokens.copy()
    prompts[203] = 60_000  # the last of four misses its TTFT on any layout
    trace = replace(few, prompt_tokens=prompts)
    plan = with_schedule(planned(), trace, hardware(), OPTIONS, PARTS)
    assert plan.schedule is not None
    assert plan.chosen is not None
    missed = plan.schedule.parts[1]
    assert (missed.joint, missed.meets) == (0.75, False)
    assert missed.layout.devices < plan.chosen.layout.devices
    assert [*plan.schedule.lines()][1].startswith("in 1 of 3 parts")


def test_times_are_those_recorded_also_at_another_load() -> None:
    faster = with_schedule(planned(), traffic().at_rate(2.0), hardware(), OPTIONS, PARTS, load=2.0).schedule
    assert faster is not None
    assert [each.end_s for each in faster.parts] == pytest.approx([each.end_s for each in found().parts])
    assert faster.parts[0].requests_per_s == pytest.approx(2 * found().parts[0].requests_per_s)


def test_no_part_is_dearer_on_whole_machines_than_the_plan() -> None:
    """Nine prefill workers need two machines beside those of six decode workers of another kind; eight need one."""
    prefill, decode = MachineKind("a", 3.0, 8), MachineKind("b", 4.0, 8)
    kinds = MachineKinds(prefill, decode)
    plan, other = ClusterLayout(8, 1, 8, 1, 2048), ClusterLayout(9, 1, 6, 1, 2048)
    assert is_smaller(other, plan)
    assert kinds.price(other) < kinds.price(plan)
    assert not may_replace(other, plan, kinds)
    assert may_replace(plan, plan, kinds)


def test_sizes_change_live_and_widths_do_not() -> None:
    plan = ClusterLayout(2, 4, 3, 2, 2048)
    assert is_smaller(plan, plan)
    assert is_smaller(ClusterLayout(1, 4, 4, 2, 2048), plan)
    others = [(3, 4, 3, 2, 2048), (2, 2, 3, 2, 2048), (2, 4, 3, 1, 2048), (2, 4, 3, 2, 8192), (0, 1, 3, 2, 2048)]
    assert not any(is_smaller(ClusterLayout(*each), plan) for each in others)
    assert least_of(plan) == ClusterLayout(1, 4, 1, 2, 2048)
    together = ClusterLayout(0, 1, 3, 2, 2048)
    assert is_smaller(least_of(together), together)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0:00"), (93_900.0, "26:05"), (12.5, "0:00:12.5"), (3600.0000001, "1:00")]
)
def test_times_are_read_as_on_a_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown
