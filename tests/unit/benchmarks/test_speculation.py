"""The benchmark of speculation runs, small, and its lines are what `make bench-speculation` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROPOSERS = ("lookahead", "draft", "early_exit", "medusa", "medusa_tree", "eagle3")
Figures = Callable[..., dict[str, dict[str, Any]]]


UNITS = {"b1": "s", "acceptance": "share", "bound": "ratio"}
FIGURES = {
    "lookup": {"lookup_copy_b1": "s", "lookup_chat_b1": "s", "lookup_chat_b32": "s", "lookup_acceptance": "share"},
    "batches": {f"auto_{name}": "s" for name in ("copy_b1", "copy_b2", "mixed_b2", "chat_b1", "chat_b2")},
    "proposers": {
        f"{name}_{what}": unit
        for name in PROPOSERS
        for what, unit in (("b1", "s"), ("acceptance", "share"), ("bound", "ratio"))
    },
    "goodput": {"goodput_ratio": "requests/s"},
    "exactness": {"exact_share": "share"},
}
BATCHING = {
    "continuous_over_static": "requests/s",
    "continuous_over_dynamic": "requests/s",
    "tokens_continuous_over_static": "tok/s",
    "tokens_continuous_over_dynamic": "tok/s",
    "continuous_ttft_p90_s": "s",
    "static_ttft_p90_s": "s",
    "dynamic_ttft_p90_s": "s",
}


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_one_line(figures: Figures, figure: str) -> None:
    lines = figures("benchmarks.speculation", "--figure", figure)
    assert {name.removeprefix("spec."): line["unit"] for name, line in lines.items()} == FIGURES[figure]
    if figure == "exactness":
        assert lines["spec.exact_share"]["value"] == 1


def test_batching_is_compared_in_lines(figures: Figures) -> None:
    lines = figures("benchmarks.speculation", "--figure", "batching")
    assert {name.removeprefix("batching."): line["unit"] for name, line in lines.items()} == BATCHING
