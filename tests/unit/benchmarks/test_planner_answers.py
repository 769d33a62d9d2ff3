"""The planner's answers to questions that another planner was asked."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import planner_grid
from benchmarks.planner_answers import KINDS, QUESTIONS, Question, answer, layout_of
from planner.search.layout import ClusterLayout
from planner.simulator.setup import Slo

ONE = {"attention_dp": 1, "devices": 8, "step_tokens": 6000, "prefill": None, "decode": [1, 8]}


@pytest.mark.parametrize(
    ("theirs", "layout"),
    [
        (ONE, ClusterLayout(0, 1, 2, 8, 8192)),
        (ONE | {"step_tokens": 400}, ClusterLayout(0, 1, 2, 8, 512)),
        (ONE | {"prefill": [2, 2], "decode": [1, 4], "step_tokens": None}, ClusterLayout(4, 2, 2, 4, 8192)),
        (ONE | {"attention_dp": 8}, None),
    ],
)
def test_their_layout_takes_all_devices(theirs: dict[str, Any], layout: ClusterLayout | None) -> None:
    assert layout_of(theirs, 16) == layout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_arrivals_are_served_more_slowly_than_even_ones(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(planner_grid, "STEP_TOKENS", (2048,))
    question = Question("llama-3-8b", "", "h100", 2, 2000, 20, Slo(0.3, 0.03))
    theirs = ClusterLayout(0, 1, 1, 2, 2048) if kind == KINDS[0] else ClusterLayout(1, 1, 1, 1, 2048)
    found = answer(question, kind, theirs)
    assert found["their_layout"] == str(theirs)
    assert 0 < found["random"]["requests_per_s"] < found["even"]["requests_per_s"]
    assert 0 < found["at_theirs"]["requests_per_s"] <= found["even"]["requests_per_s"] * 1.03


def test_questions_have_names_of_their_own() -> None:
    assert len({each.name for each in QUESTIONS}) == len(QUESTIONS)
