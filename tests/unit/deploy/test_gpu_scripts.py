"""The scripts for machines with GPUs: every step runs here, tiny and on the CPU, and each end is reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
FIRST = ("device", "engine_exact", "handoff", "served", "engine_speed", "handoff_speed", "exposed_share", "kernels")
FIGURES = {
    *(f"engine.gpu_{name}_b1" for name in ("decode_mbu", "sampled_ratio", "decode")),
    "engine.gpu_prefill_mfu",
    "handoff.gpu_mapped",
    "handoff.gpu_exposed_share",
}


def run(*command: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(path or ROOT)}
    text = [str(each) for each in command]
    return subprocess.run(text, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False)


def results(folder: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Exit codes by step, and figures."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["rc"] for line in lines if "step" in line}
    return steps, {line["figure"]: line for line in lines if "figure" in line}


def log_of_failed(folder: Path, steps: dict[str, int]) -> str:
    return "\n".join((folder / f"{name}.log").read_text()[-4000:] for name, rc in steps.items() if rc)


@pytest.fixture
def no_ray(tmp_path: Path) -> Path:
    """A folder of modules in which Ray cannot be imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ray.py").write_text('raise ImportError("this machine has no Ray")\n')
    return tmp_path / "modules"


@pytest.mark.slow
def test_every_step_of_the_first_run_runs_without_ray_and_is_reported(tmp_path: Path, no_ray: Path) -> None:
    done = run(SCRIPTS / "first-gpu-run.sh", "--quick", tmp_path / "out", path=no_ray)
    steps, figures = results(tmp_path / "out")
    assert steps == dict.fromkeys(FIRST, 0), log_of_failed(tmp_path / "out", steps)
    assert done.returncode == 0
    assert figures.keys() > FIGURES
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.startswith("# First run on a GPU\n")
    assert all(f"| {step} | passed |" in report for step in steps)
    assert all(f"| `{figure}` |" in report for figure in figures)


@pytest.mark.slow
def test_every_step_of_the_run_on_two_gpus_runs_and_is_reported(tmp_path: Path) -> None:
    done = run(SCRIPTS / "two-gpu-run.sh", "--quick", tmp_path)
    steps, figures = results(tmp_path)
    names = ("device", "copies", "nccl", "served", "ranks", "handoff_speed")
    assert steps == dict.fromkeys(names, 0), log_of_failed(tmp_path, steps)
    assert done.returncode == 0
    assert figures.keys() == {"handoff.gpu_peer_mapped", "handoff.gpu_nccl"}
    assert "| handoff_speed | passed |" in (tmp_path / "report.md").read_text()


STEPS = """
source scripts/gpu-run.sh "A run" unused "$1"
step passes 60 echo '{"figure": "f.one", "value": 2, "unit": "GB/s", "reference": 4, "ratio": 0.5}'
step fails 60 sh -c 'echo what went wrong; exit 3'
step hangs 1 sleep 60
step last 60 echo '{"figure": "f.two", "value": 1, "unit": "1", "reference": null, "ratio": null}'
report
"""


def test_a_step_that_fails_or_hangs_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    done = run("bash", "-c", STEPS, "bash", tmp_path)
    steps, figures = results(tmp_path)
    assert done.returncode == 1
    assert steps == {"passes": 0, "fails": 3, "hangs": 124, "last": 0}
    assert figures.keys() == {"f.one", "f.two"}
    report = (tmp_path / "report.md").read_text()
    for line in ("| passes | passed |", "| fails | failed |", "| hangs | ran out of time |", "| last | passed |"):
        assert line in report
    assert "| `f.one` | 2 | GB/s | 4 | 0.5 |" in report
    assert "## The end of fails.log\n\n```\nwhat went wrong\n```" in report


@pytest.mark.slow  # imports torch
def test_a_machine_with_too_few_gpus_is_told_so(tmp_path: Path) -> None:
    script = 'source scripts/gpu-run.sh "A run" unused "$1"\nneeds_gpus 99\nstep never 60 true\nreport\n'
    done = run("bash", "-c", script, "bash", tmp_path)
    assert done.returncode == 1
    assert results(tmp_path)[0] == {"device": 1}
    assert "expected 99 GPUs or more, torch finds" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("script", "minutes"), [("first-gpu-run.sh", 15), ("two-gpu-run.sh", 15)])
def test_the_steps_end_within_the_time_that_the_script_states(script: str, minutes: int) -> None:
    text = (SCRIPTS / script).read_text()
    limits = [int(limit) for limit in re.findall(r"(?m)\bstep \w+ (\d+) ", text)]
    device = int(re.findall(r"step device (\d+)", (SCRIPTS / "gpu-run.sh").read_text())[0])
    assert f"{minutes} minutes" in text
    assert len(limits) >= 6
    assert device + sum(limits) <= 60 * minutes
