"""A local Ray cluster: what no longer answers is named within 10 s, and nothing of it is left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.testing.processes import command_lines


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))  # Ray's socket paths leave no room for pytest's folders
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
@pytest.mark.slow
def test_a_part_that_is_frozen_is_named_and_everything_ends(folder: Path, part: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = [sys.executable, "-m", "cluster.backends.ray_head", str(folder), "--cpus", "1", "--gpus", "0"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as head:
        try:
            while not (folder / "address").exists():
                assert head.poll() is None
                time.sleep(0.05)
            family = psutil.Process(head.pid).children(recursive=True)
            frozen = next(each for each in family if Path(each.cmdline()[0]).name == part)
            frozen.suspend()
            assert head.stderr is not None
            started_s = time.monotonic()
            said = ""
            while f"Ray's {part}" not in said and (line := head.stderr.readline()):
                said += line
            assert f"Ray's {part}" in said
            assert time.monotonic() - started_s < 30.0  # other tests may keep the machine busy
            assert head.wait(30) == 1
        finally:
            head.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert command_lines(alive) == []


ASK = """
import os, sys, time
from cluster.backends.ray_head import Probe

probe, started_s = Probe(sys.argv[1]), time.monotonic()
while not probe.silence() and time.monotonic() - started_s < 20:
    time.sleep(0.1)
print(probe.silence(), flush=True)
os._exit(0)  # the client of Ray waits for minutes
"""


def test_a_gcs_that_is_frozen_before_its_first_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        asked = subprocess.run([sys.executable, "-c", ASK, address], capture_output=True, text=True, timeout=60)
    assert asked.stdout.startswith("Ray's gcs_server has not answered for 6 s"), asked.stderr
