"""The rules of papers beside the router's own: each load is one that its rule serves, and the next it does not."""

from __future__ import annotations

import pytest

from benchmarks import planner_grid
from benchmarks.planner_grid import ATTAINMENT, MOST_RUNNING, START, Cell, Loads, Place
from benchmarks.planner_papers import BALANCED, PLACE, answers, questions
from planner.search.analytic import allowed_misses
from planner.search.evaluate import Evaluator, Job
from planner.search.layout import ClusterLayout
from planner.simulator.setup import Paper

REQUESTS = 60
SMALL = Place("llama-3-8b", "h100", 2, PLACE.tpot_s)


@pytest.mark.slow
def test_each_rule_has_a_line_beside_the_routers_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_grid, "STEP_TOKENS", (2048,))
    question = next(each for each in questions(None) if each.name == "chat_start")
    lines = {line["rule"]: line for line in answers(question, REQUESTS, SMALL)}
    own = ["aggregated", "disaggregated"]
    assert list(lines) == [*own, *(f"{name}_bounded" for name in own), *Paper]
    assert max(lines["aggregated"]["value"], lines["disaggregated"]["value"]) == 1.0


@pytest.mark.parametrize(("paper", "bounds_steps"), [(Paper.DEFLECTION, False), (Paper.TAICHI, False), (None, True)])
def test_the_largest_load_is_met_by_the_rule_and_the_next_is_not(paper: Paper | None, bounds_steps: bool) -> None:
    question = next(each for each in questions(None) if each.name == "chat_start")
    trace, layout = question.traffic.draw(REQUESTS), ClusterLayout(1, 1, 1, 1, 2048)
    assert trace is not None
    hardware = Cell(SMALL, question.traffic, "rdma", START).hardware
    served = Loads(trace, hardware, question.slo, paper, bounds_steps=bounds_steps).largest(layout, 1.0)
    assert served is not None
    assert served.missed_at is not None
    evaluator = Evaluator(
        trace, hardware, question.slo, MOST_RUNNING, paper, question.slo.tpot_s if bounds_steps else None
    )
    most = allowed_misses(ATTAINMENT, REQUESTS)
    for load, is_met in ((served.load, True), (served.missed_at, False)):
        assert evaluator.evaluate(Job(layout, REQUESTS, load=load, most_misses=most)).meets(ATTAINMENT) is is_met


def test_balanced_objectives_lie_between_the_hard_and_the_easy() -> None:
    for question in questions(None):
        if question.objectives == BALANCED:
            hard, easy = question.traffic.ttft_s
            assert question.slo.ttft_s is not None
            assert hard < question.slo.ttft_s < easy


def test_recorded_turns_are_left_out_without_their_folder() -> None:
    turns = [each for each in questions(None) if each.traffic.name == "turns"]
    assert len(turns) == 3
    assert all(not list(answers(each)) for each in turns)
