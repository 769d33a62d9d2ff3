from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def figures() -> Callable[..., dict[str, dict[str, Any]]]:
    """`figures("benchmarks.handoff", "--figure", "mapped")`: the lines it prints at quick sizes, by figure."""

    def run(module: str, *options: str) -> dict[str, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", module, "--quick", *options],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return {line["figure"]: line for line in map(json.loads, done.stdout.splitlines())}

    return run
