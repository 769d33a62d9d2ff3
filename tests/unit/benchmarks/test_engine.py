"""The engine benchmark runs, whole and small, and its lines are what `make bench-engine` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Figures = Callable[..., dict[str, dict[str, Any]]]


def test_every_figure_is_one_line_in_every_mode(figures: Figures) -> None:
    lines = figures("benchmarks.engine", "--threads", "1")
    decodes = {
        f"engine.decode_b{batch}{mode}"
        for batch in (1, 3)
        for mode in ("", "_fp32", "_int8_kv8", "_int8_kvfp8", "_int4")
    }
    reads = {"engine.read_rate_b1_fp32", "engine.read_rate_b1_int8"}
    on_cpu, as_on_gpu = ("fp32", "int8", "int8_kv8", "int8_kvfp8", "int4"), ("gpu_int8", "gpu_fp8", "gpu_fp8_kvfp8")
    perplexities = {f"engine.perplexity_{mode}" for mode in (*on_cpu, *as_on_gpu)}
    prefills = {"engine.prefill_24", "engine.prefill_24_fp32"}
    others = {"engine.step_overhead_ms", "engine.restore_24_ms", "engine.served_b3", "engine.served_b3_int8_kvfp8"}
    others |= {"engine.moe_prefill_ratio", "engine.moe_decode_ratio"}
    assert lines.keys() == decodes | reads | prefills | perplexities | others
    for line in lines.values():
        assert list(line) == ["figure", "value", "unit", "reference", "ratio"]
        assert line["value"] > 0
    exact = lines["engine.perplexity_fp32"]
    assert abs(exact["ratio"] - 1) < 1e-3
