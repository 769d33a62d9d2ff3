"""The benchmark of constrained answers runs, small, and its lines are what `make bench-structured` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Figures = Callable[..., dict[str, dict[str, Any]]]


def test_every_figure_is_one_line(figures: Figures) -> None:
    lines = figures("benchmarks.structured")
    assert {name.removeprefix("structured."): line["unit"] for name, line in lines.items()} == {
        "schemas_refused": "schemas",
        "compile_p50_ms": "ms",
        "compile_p99_ms": "ms",
        "mask_p50_us": "us",
        "mask_p99_us": "us",
        "parse_us_per_token": "us",
        "tpot_ratio_b32": "ms",
        "forced_speedup": "s",
        "valid_share": "share",
        "ended_share": "share",
        "beside_worst_p99_ms": "ms",
    }
    assert lines["structured.valid_share"]["value"] == 1
