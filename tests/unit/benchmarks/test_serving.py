"""The arithmetic of the serving benchmark; that it runs is checked by tests/e2e/test_readme.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_serving", ROOT / "benchmarks" / "serving.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_percentiles_interpolate(serving: ModuleType) -> None:
    assert serving.percentile([3.0], 0.99) == 3.0
    assert serving.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert serving.percentile([1.0, 2.0], 1.0) == 2.0


def test_figures_count_failures_and_time(serving: ModuleType) -> None:
    sample = serving.Sample(ttft_s=0.1, total_s=1.0, output_tokens=10, handoff_s=0.01, kv_bytes_moved=100)
    figures = {name: value for name, value, _ in serving.figures_of([sample, sample], failures=1, elapsed_s=2.0)}
    assert figures["failed_requests"] == 1
    assert figures["ttft_p50"] == pytest.approx(100)
    assert figures["tpot_p50"] == pytest.approx(100)  # 0.9 s for the nine tokens after the first
    assert figures["output_tokens_per_s"] == pytest.approx(10)
    assert dict((name, unit) for name, _, unit in serving.figures_of([], 3, 1.0)) == {"failed_requests": "requests"}


def test_an_earlier_run_is_the_reference(serving: ModuleType, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(json.dumps({"figure": "a", "value": 2.0, "unit": "ms", "reference": None, "ratio": None}) + "\n")
    assert serving.references_in(earlier) == {"a": 2.0}
    assert serving.references_in(None) == {}
