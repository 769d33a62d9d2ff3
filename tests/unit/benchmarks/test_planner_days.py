"""The benchmark of the autoscaler's days: from every start, beside every split."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner_days import DAYS, WORKERS, days


def test_a_day_is_run_at_every_split_and_from_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"2023-11-16 18:00:{second:02}.0000000,{900 + 7 * second},{20 + second}" for second in range(60)]
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    (tmp_path / "azure2023_conv_full.csv").write_text("\n".join([header, *rows]))
    found = {each.figure: each for each in days(tmp_path, 40, 1)}
    assert found.keys() == {
        "pools.worst_static_ratio_azure", "pools.best_static_ratio_azure", "pools.role_changes_per_hour_azure",
        "pools.worst_static_ratio", "pools.best_static_ratio",
    }  # fmt: skip
    assert found["pools.best_static_ratio"].value == found["pools.best_static_ratio_azure"].value <= 1.0
    said = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("azure ") for line in said) == WORKERS + 4
    assert sum("omitted" in line for line in said) == len(DAYS) - 1


def test_without_traces_there_is_no_figure() -> None:
    assert list(days(None, 40, 1)) == []
