"""The planner's benchmark runs, whole and small, and its lines are what `make bench-planner` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.planner_regret import cases

Figures = Callable[..., dict[str, dict[str, Any]]]


@pytest.mark.slow
def test_every_figure_that_needs_no_trace_is_one_line(figures: Figures) -> None:
    lines = figures("benchmarks.planner")
    assert {name: line["unit"] for name, line in lines.items()} == {
        "sim.million_min_from_500": "min",
        "sim.million_rss_gb_from_500": "GiB",
        "plan.search_s": "s",
        "plan.regret": "share",
        **{f"plan.regret_{case.name}": "share" for case in cases(None) if case.trace(1) is not None},
    }
    assert lines["plan.regret"]["value"] == 0.0
    assert all(list(line) == ["figure", "value", "unit", "reference", "ratio"] for line in lines.values())
