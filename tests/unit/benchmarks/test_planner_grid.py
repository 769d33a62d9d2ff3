"""The grid of disaggregated beside aggregated layouts: each load is the largest of its layout."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import planner_grid
from benchmarks.planner_grid import ATTAINMENT, START, STREAM, Cell, Place, cells, compare, made_up
from planner.search.analytic import allowed_misses
from planner.search.evaluate import Evaluator, Job

REQUESTS = 150
SMALL = Place("llama-3-8b", "h100", 2, (0.015, 0.05))


def small(hard: str, traffic: str = "chat") -> Cell:
    return Cell(SMALL, next(each for each in made_up() if each.name == traffic), "rdma", hard)


@pytest.fixture(autouse=True)
def few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_grid, "STEP_TOKENS", (2048,))


@pytest.mark.parametrize("hard", [pytest.param(STREAM, marks=pytest.mark.slow), START])
def test_each_kind_serves_its_load_and_not_the_next(hard: str) -> None:
    cell = small(hard)
    found = compare(cell, REQUESTS, resamples=1)
    assert found is not None
    trace = cell.traffic.draw(REQUESTS)
    assert trace is not None
    evaluator = Evaluator(trace, cell.hardware, cell.slo, 256)
    most = allowed_misses(ATTAINMENT, REQUESTS)
    together, apart = found.together, found.apart
    assert together is not None
    assert apart is not None
    for served in (together, apart):
        assert served.missed_at is not None
        assert served.layout.devices == 2
        for load, is_met in ((served.load, True), (served.missed_at, False)):
            assert evaluator.evaluate(Job(served.layout, REQUESTS, load=load, most_misses=most)).meets(0.95) is is_met
        assert served.load < served.missed_at <= 1.021 * served.load
    line = json.loads(found.line())
    assert line["value"] == round(apart.load / together.load, 3)
    assert len(line["others"]) == 1


def test_where_one_kind_serves_nothing_there_is_no_ratio() -> None:
    """One device cannot be disaggregated."""
    found = compare(replace(small(STREAM), place=replace(SMALL, devices=1)), REQUESTS)
    assert found is not None
    assert found.apart is None
    assert found.together is not None
    line = json.loads(found.line())
    assert (line["value"], line["disaggregated"], line["others"]) == (None, None, [])


def test_recorded_traffic_is_left_out_without_its_folder() -> None:
    recorded = [each for each in cells(None) if each.traffic.name in ("azure", "mooncake")]
    assert recorded
    assert all(compare(each) is None for each in recorded)


def test_names_are_unlike() -> None:
    names = [each.name for each in cells(None)]
    assert len(set(names)) == len(names)
