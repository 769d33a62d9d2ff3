"""Phases stand where their arithmetic and their bytes put them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.pages.report import html_report
from planner.search.goal import Goal
from planner.search.plan import Plan, SearchOptions, make_plan, with_grid
from planner.search.roofline import rooflines_of
from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return Hardware(find_model("llama-3-8b"), find_device("h100"))


@pytest.fixture(scope="module")
def trace() -> TrafficTrace:
    count = 200
    return TrafficTrace("t", np.arange(count) / 4.0, np.full(count, 2000), np.full(count, 200))


@pytest.fixture(scope="module")
def plan(hardware: Hardware, trace: TrafficTrace) -> Plan:
    return make_plan(trace, hardware, Goal(Slo(ttft_s=2.0, tpot_s=0.05), max_devices=4), SearchOptions(requests=200))


def test_prefill_is_bound_by_arithmetic_and_decode_by_memory(
    plan: Plan, hardware: Hardware, trace: TrafficTrace
) -> None:
    (found,) = rooflines_of(plan, hardware, trace)
    assert found.ridge == pytest.approx(found.flops_per_s / found.memory_bytes_per_s)
    prefill, *decode = found.points
    assert prefill.phase == "prefill"
    assert prefill.intensity > found.ridge
    assert 0.3 < prefill.mfu <= found.mfu
    assert decode[0].what == "1 request"
    assert decode[0].intensity == pytest.approx(1.0, rel=0.1), "two FLOPs for each weight of two bytes"
    assert all(each.intensity < found.ridge for each in decode)
    assert [each.intensity for each in decode] == sorted(each.intensity for each in decode)
    for each in found.points:
        assert each.flops_per_s == pytest.approx(each.mfu * found.flops_per_s)
        assert each.mfu <= found.mfu + 1e-9
        assert each.mbu <= found.mbu + 1e-9


def test_narrow_experts_count_by_their_peak(trace: TrafficTrace) -> None:
    """Their FLOPs are many more than those of 16 bits in the same time."""
    narrow = Hardware(find_model("gpt-oss-20b"), find_device("b200"))
    plan = make_plan(trace, narrow, Goal(Slo(ttft_s=2.0, tpot_s=0.05), max_devices=2), SearchOptions(requests=200))
    (found,) = rooflines_of(plan, narrow, trace)
    assert all(each.mfu <= found.mfu + 1e-9 and each.mbu <= found.mbu + 1e-9 for each in found.points)
    assert found.points[-1].what == "256 requests"


def test_a_report_shows_it(plan: Plan, hardware: Hardware, trace: TrafficTrace) -> None:
    page = html_report(plan, "roofline", (), rooflines_of(plan, hardware, trace))
    assert "<div class='chart' id='roofline'>" in page
    assert "decode, 64 requests" in page
    assert "id='roofline'" not in html_report(plan, "roofline")


def test_the_grid_has_the_plan_and_its_neighbours_on_these_devices(
    plan: Plan, hardware: Hardware, trace: TrafficTrace
) -> None:
    found = with_grid(plan, trace, hardware, SearchOptions(requests=200))
    assert found.simulated == plan.simulated, "of the search"
    assert found.chosen is not None
    layouts = [each.layout for each in found.grid]
    assert found.chosen.layout in layouts
    assert len({*layouts}) == len(layouts) > 3
    assert all(each.devices <= 4 for each in layouts)
    assert {each.decode_tp for each in layouts} == {found.chosen.layout.decode_tp}
    joint = next(each.joint for each in found.grid if each.layout == found.chosen.layout)
    assert joint == found.chosen.joint
    assert "<div class='chart' id='grid'>" in html_report(found, "roofline")
    assert not plan.grid


def test_without_a_plan_or_a_roofline_there_is_none(plan: Plan, hardware: Hardware, trace: TrafficTrace) -> None:
    assert not rooflines_of(replace(plan, chosen=None), hardware, trace)
    assert not rooflines_of(plan, replace(hardware, constrained=0.5), trace)
