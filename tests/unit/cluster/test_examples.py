"""The examples without a cluster: one line that says who does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["chat_openai.py", "chat_grpc.py"])
def test_without_a_router_an_example_ends_in_one_line(name: str) -> None:
    env = os.environ | {"TANDEM_HTTP": "http://127.0.0.1:9", "TANDEM_GRPC": "127.0.0.1:9"}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
