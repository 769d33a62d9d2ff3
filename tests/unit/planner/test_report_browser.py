"""The report in a real browser: its charts are drawn, without network and without errors. The picture of docs/images is
made here: TANDEM_SCREENSHOTS=docs/images make check-deploy ARGS=tests/unit/planner/test_report_browser.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.pages.report import html_report
from planner.search.goal import Goal
from planner.search.plan import SearchOptions, make_plan, with_grid
from planner.search.roofline import rooflines_of
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from tandem.config.spec import ClusterSpec

ROOT = Path(__file__).resolve().parents[3]
MAX_PICTURE_BYTES = 400_000
CHARTS = ("goodput-cost", "ttft-tpot", "variants", "grid", "roofline")


def chromium(page: Path, folder: Path, *options: str) -> str:
    browser = shutil.which("chromium")
    assert browser is not None, "expected chromium: make check-deploy installs it"
    common = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--window-size=1200,2400")
    network_off = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [browser, *common, network_off, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def expect_charts(page: Path, folder: Path) -> None:
    drawn = chromium(page, folder, "--dump-dom")
    for name in CHARTS:
        chart = drawn.partition(f'id="{name}"')[2].partition("</script>")[0]
        assert "main-svg" in chart, f"{name} was not drawn"
        assert 'class="point' in chart or 'class="points"' in chart


@pytest.mark.system
def test_the_charts_are_drawn(tmp_path: Path) -> None:
    trace = synthetic_trace(100, Gamma(8.0), LengthSpec(800, 0.5), LengthSpec(40, 0.5), seed=1)
    goal = Goal(Slo(0.5, 0.03), 0.9, 2, (2048,))
    hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))
    plan = make_plan(trace, hardware, goal, SearchOptions(60))
    plan = with_grid(plan, trace, hardware, SearchOptions(60))
    page = tmp_path / "report.html"
    page.write_text(html_report(plan, "roofline of h100", (), rooflines_of(plan, hardware, trace)), encoding="utf-8")
    expect_charts(page, tmp_path)
    chromium(page, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes())) == 2
    chromium(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 20_000


@pytest.mark.system
def test_the_readmes_plan_of_a_large_model_opens_with_its_charts(tmp_path: Path) -> None:
    """Llama-3-70B on H100s with lengths like those of Azure's conversations, from the README's own command."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- test: plan -->\n```\w*\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    command = shlex.split(found[1].replace("\\\n", " "), comments=True)
    assert command[:2] == ["tandem", "plan"]
    assert command[command.index("--model") + 1] == "llama-3-70b"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ours = [sys.executable, "-m", "cluster", *command[1:]]
    done = subprocess.run(ours, cwd=tmp_path, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expect_charts(tmp_path / "plan.html", tmp_path)
    picture = tmp_path / "plan-report.png"
    chromium(tmp_path / "plan.html", tmp_path, f"--screenshot={picture}")
    assert 20_000 < picture.stat().st_size < MAX_PICTURE_BYTES
    values = yaml.safe_load((tmp_path / "plan.yaml").read_text(encoding="utf-8"))
    ClusterSpec.model_validate(values["cluster"])  # what the chart and `tandem up` take
    if folder := os.environ.get("TANDEM_SCREENSHOTS"):
        shutil.copy(picture, ROOT / folder / picture.name)
