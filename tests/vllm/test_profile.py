"""`tandem profile` of vLLM, in a process of its own: each can have only one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from planner.fitted import read_host, read_mask_s_per_row, read_measured
from tandem.testing.models import write_tiny_llama
from tests.vllm.conftest import ENGINE

PROFILE = """
import sys
from pathlib import Path
from cluster.cli.commands.planning.profile import run_profile
from cluster.profiling.profiler import Grid

grid = Grid(chunks=(16, 32, 64), batches=(1, 2, 4), contexts=(16, 48, 400))
sys.exit(run_profile(Path(sys.argv[1]), None, "cpu", Path(sys.argv[2]), grid))
"""


def test_steps_of_vllm_are_measured_and_simulated_with(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "tiny", head_dim=32, eos_token_id=2)
    config, cost = tmp_path / "cluster.yaml", tmp_path / "cost.json"
    engine = ENGINE.model_dump(exclude_defaults=True) | {"vllm": {"long_prefill_token_threshold": 32}}
    config.write_text(yaml.safe_dump({"models": [{"source": str(model_dir), "engine": engine}]}))
    done = subprocess.run(
        [sys.executable, "-c", PROFILE, str(config), str(cost)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (measured,) = read_measured(cost).values()
    assert measured.prefill_s(64, 0) > 0
    assert measured.decode_step_s(4, 100) >= measured.decode_step_s(1, 100) > 0
    assert read_mask_s_per_row(cost) is not None, done.stderr
    assert read_host(cost).cores == len(os.sched_getaffinity(0))
    traffic = ["synthetic", "--arrivals", "poisson:5", "--lengths", "30:5", "--requests", "20"]
    hardware = ["--model", str(model_dir), "--cost", str(cost), "--element-bytes", "4", "--one-host"]
    result = CliRunner().invoke(app, ["simulate", *traffic, *hardware])
    assert result.exit_code == 0, result.output
