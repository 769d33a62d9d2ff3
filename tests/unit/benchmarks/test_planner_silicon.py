"""The figure of step times against published measurements: what it takes, fits and holds out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.planner_silicon import FITTED, Point, fit, mean_error, predict, read
from planner.devices import DeviceSpec, find_device
from planner.hardware import Hardware

COLUMNS = (
    "id", "silicon_data_source", "backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode",
    "batch_size", "tp_size", "attention_dp_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip


OTHERS: tuple[dict[str, str], ...] = (
    {"mode": "disagg"}, {"system": "l40s"}, {"model_path": "x"}, {"tp_size": "16"}, {"gemm_quant_mode": "int4_wo"},
    {"model_path": "Qwen/Qwen3-32B", "gemm_quant_mode": "nvfp4"},
    {"silicon_ttft_ms": "900000"},  # its requests waited for a place
)  # fmt: skip
DENSE = ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B")
SPARSE = ("openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B-FP8")


def table(folder: Path, device: DeviceSpec, share: float) -> Path:
    """Measurements of a device, on which a request sees this share of the others' prefill: of dense models, and of
    those with experts."""
    path = folder / "silicon.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        for number in range(240):
            row = {
                "id": f"{number}", "silicon_data_source": "source_file=a.csv; c=1", "backend": "vllm", "mode": "agg",
                "model_path": (DENSE if number < 120 else SPARSE)[number % 2],
                "system": f"{device.name}_sxm",
                "isl": f"{(1024, 2048, 4096)[number % 5 % 3]}", "osl": f"{(128, 512)[number % 7 % 2]}",
                "gemm_quant_mode": ("fp8", "")[number // 2 % 2], "batch_size": f"{(1, 8, 32, 64)[number // 4 % 4]}",
                "tp_size": f"{(4, 8)[number // 3 % 2]}", "attention_dp_size": "",
                "silicon_ttft_ms": "9", "silicon_tpot_ms": f"{1 + number / 1000}",
            }  # fmt: skip
            rows.writerow(row)
        for other in OTHERS:
            rows.writerow(row | {"id": f"{other}", "silicon_tpot_ms": "7"} | other)
        rows.writerow(row | {"id": "again"})
    points = [(each, each.step_times(Hardware(each.model, device).cost(each.tp))) for each in read(path)]
    times = {each.row["id"]: 1000 * (decode_s + share * more_s) for each, (decode_s, more_s) in points}
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        rows.writerows(dict(each.row) | {"silicon_tpot_ms": str(times[each.row["id"]])} for each, _ in points)
    return path


@pytest.fixture
def points(tmp_path: Path) -> list[Point]:
    return read(table(tmp_path, find_device("h100"), 0.6))


def test_it_takes_once_what_one_worker_ran_at_once(points: list[Point]) -> None:
    assert 160 < len(points) <= 240
    assert all(each.row["id"].isdigit() for each in points)
    for family in FITTED:
        assert {each.held_out for each in points if each.family == family} == {True, False}


def test_the_share_of_prefill_that_requests_see_is_found(points: list[Point]) -> None:
    assert mean_error(points, predict(points, find_device("h100")), held_out=True) < 1e-6


def test_a_fit_comes_nearer_to_what_it_has_not_seen(points: list[Point]) -> None:
    worse = {"mbu": 0.5, "layer_overhead_s": 1e-5, "row_overhead_s": 1e-5, "expert_overhead_s": 0.0}
    device = find_device("h100").model_copy(update=worse)
    before = mean_error(points, predict(points, device), held_out=True)
    fitted = fit(points, device)
    after = mean_error(points, predict(points, fitted), held_out=True)
    assert before > 0.1
    assert after < 0.03
    assert all(getattr(fitted, name) != worse[name] for name in worse)
