"""The planner's benchmark runs, whole and small, and its lines are what `make bench-planner` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Figures = Callable[..., dict[str, dict[str, Any]]]


def test_every_figure_that_needs_no_trace_is_one_line(figures: Figures) -> None:
    lines = figures("benchmarks.planner")
    assert {name: line["unit"] for name, line in lines.items()} == {
        "sim.million_min_from_500": "min",
        "sim.million_rss_gb_from_500": "GiB",
        "plan.search_s": "s",
        "plan.regret": "share",
    }
    assert all(list(line) == ["figure", "value", "unit", "reference", "ratio"] for line in lines.values())
