"""The benchmark of GPUs runs, tiny and on the CPU, through the code that it measures there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_every_figure_is_one_line(figures: Callable[..., dict[str, dict[str, Any]]]) -> None:
    lines = figures("benchmarks.engine_device")
    decodes = {f"engine.gpu_{name}_b{batch}" for name in ("decode_mbu", "decode", "sampled_ratio") for batch in (1, 3)}
    assert lines.keys() == decodes | {"engine.gpu_prefill_mfu", "engine.gpu_decode_b3_fp8"}  # gaps are a device's own
    for line in lines.values():
        assert line["value"] > 0
        assert line["reference"] > 0
