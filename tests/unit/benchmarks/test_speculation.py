"""The benchmark of speculation runs, small, and its lines are what `make bench-speculation` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Figures = Callable[..., dict[str, dict[str, Any]]]


def test_every_figure_is_one_line(figures: Figures) -> None:
    lines = figures("benchmarks.speculation")
    assert {name.removeprefix("spec."): line["unit"] for name, line in lines.items()} == {
        "lookup_copy_b1": "s",
        "lookup_chat_b1": "s",
        "lookup_chat_b32": "s",
        "lookup_acceptance": "share",
        "exact_share": "share",
    }
    assert lines["spec.exact_share"]["value"] == 1
