"""The report in a real browser: its charts are drawn, without network and without errors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.halving import Effort
from planner.search.plan import Goal, Means, make_plan
from planner.search.report import html_report
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace

CHARTS = ("goodput-cost", "ttft-tpot", "variants")


def chromium(page: Path, folder: Path, *options: str) -> str:
    browser = shutil.which("chromium")
    assert browser is not None, "expected chromium: make check-deploy installs it"
    common = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--window-size=1200,2400")
    network_off = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [browser, *common, network_off, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.system
def test_the_charts_are_drawn(tmp_path: Path) -> None:
    trace = synthetic_trace(100, Gamma(8.0), LengthSpec(800, 0.5), LengthSpec(40, 0.5), seed=1)
    goal = Goal(Slo(0.5, 0.03), 0.9, 2, (2048,))
    hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))
    plan = make_plan(trace, hardware, goal, Means(effort=Effort(60)))
    page = tmp_path / "report.html"
    page.write_text(html_report(plan, "roofline of h100"), encoding="utf-8")
    drawn = chromium(page, tmp_path, "--dump-dom")
    for name in CHARTS:
        chart = drawn.partition(f'id="{name}"')[2].partition("</script>")[0]
        assert "main-svg" in chart, f"{name} was not drawn"
        assert 'class="point' in chart or 'class="points"' in chart
    chromium(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 20_000
