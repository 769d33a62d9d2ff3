"""OpenAI's own clients: Python's of three major versions, Node's, and the example that is an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.clients.conftest import ROOT

if TYPE_CHECKING:
    from tests.clients.conftest import Server

HERE = ROOT / "tests" / "clients"
OLDER = ROOT / ".cache" / "clients"


def run(server: Server, *command: str, version: str = "3") -> str:
    path = f"{OLDER / f'openai-{version}'}{os.pathsep}{ROOT}"
    env = os.environ | {"TANDEM_HTTP": server.url, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_python_client(server: Server, version: str) -> None:
    said = run(server, sys.executable, "-m", "tests.clients.openai_client", version=version)
    assert said.startswith(f"openai {version}.")


@pytest.mark.skipif(not (OLDER / "node").exists(), reason="npm was not found when .cache/clients was made")
def test_node_client(server: Server) -> None:
    script = OLDER / "node" / "openai_client.mjs"
    script.write_text((HERE / "openai_client.mjs").read_text())  # Node looks for packages beside the script
    assert "ok" in run(server, "node", str(script))


def test_example_agent_calls_tools_and_then_answers(server: Server) -> None:
    agent = str(ROOT / "examples" / "agent" / "agent.py")
    *calls, answer = run(
        server, sys.executable, agent, "--calls", "2", "--turns", "3", "What is 6 times 7?"
    ).splitlines()
    assert sum(" -> " in line for line in calls) == 2
    assert answer
