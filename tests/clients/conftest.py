"""One cluster of the demo model, 1 prefill and 1 decode worker, for client libraries in an environment of their own.

`make clients` runs these tests. Tandem itself runs in its own environment: `TANDEM` is the path of its `tandem`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODEL = "smollm2-135m"
READY_TIMEOUT_S = 300.0
REST_TIMEOUT_S = 30.0
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Server:
    url: str
    grpc: str  # host:port

    @property
    def openai(self) -> dict[str, Any]:
        """Settings of OpenAI's client and of what is built on it."""
        return {"base_url": f"{self.url}/v1", "api_key": "none"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)


def wait_until_at_rest(command: list[str], env: dict[str, str]) -> None:
    """Until no block is leased or in use, and every block is accounted for."""
    deadline = time.monotonic() + REST_TIMEOUT_S
    while True:
        done = subprocess.run([*command, "status", "--json"], env=env, capture_output=True, check=True)
        blocks: list[dict[str, int]] = [worker["blocks"] for worker in json.loads(done.stdout)["workers"]]
        if all(
            each["leased"] == each["in_use"] == 0 and each["free"] + each["cached"] == each["total"] for each in blocks
        ):
            return
        assert time.monotonic() < deadline, blocks
        time.sleep(0.3)


@pytest.fixture(scope="session")
def model_folder() -> str:
    """Holds the tokenizer, with which some clients count tokens."""
    command = [*os.environ["TANDEM"].split(), "pull", MODEL]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r" is in (.+)", said)
    assert found is not None, said
    return found[1]


@pytest.fixture
def folder(model_folder: str, tmp_path: Path) -> Path:
    """A home in which the hub's cache has the model's tokenizer, so that a client's defaults need no hub."""
    cache, revision = tmp_path / "hub" / f"models--{MODEL}", "0" * 40
    for name in ("refs", "snapshots"):
        (cache / name).mkdir(parents=True)
    (cache / "refs" / "main").write_text(revision)
    (cache / "snapshots" / revision).symlink_to(model_folder)
    return tmp_path


def run_client(*command: str, folder: Path) -> None:
    """Runs a Python client's command, which asks no hub. `folder`: its working and home folder."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240.0,
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("cluster")
    http_port, grpc_port, admin_port = free_ports(3)
    spec: dict[str, Any] = {
        "router": {"http_port": http_port, "grpc_port": grpc_port, "disaggregation": "always"},
        "control": {"admin_port": admin_port, "backend": "subprocess"},
        "models": [{"source": MODEL, "engine": {"speculation": "lookup", "speculation_adaptive": False}}],
    }
    config, log = folder / "cluster.yaml", folder / "up.log"
    config.write_text(json.dumps(spec))
    command = os.environ["TANDEM"].split()
    env = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    started = [*command, "up", "--config", str(config), "--prefill", "1", "--decode", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(started, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{http_port}"
    try:
        wait_until_ready(url, process, log)
        yield Server(url, f"127.0.0.1:{grpc_port}")
        wait_until_at_rest(command, env)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(120.0)
    assert code == 0, log.read_text()[-4000:]
