"""`tandem up --detach`, `tandem down`, and options that other servers have."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from cluster.cli.state_file import of_this_process, written
from tandem.testing.models import write_tiny_llama

PORTS = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0")


def tandem(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "cluster", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_detached_cluster_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    options = ("--served-model-name", "mine", "--max-model-len", "512", "--dtype", "float32", "--host", "127.0.0.1")
    up = tandem(
        tmp_path, "up", "--detach", "--backend", "subprocess", "--model", str(model), "--name", "b", *options, *PORTS
    )
    assert up.returncode == 0, up.stdout + up.stderr
    url = re.search(r"http://[\d.:]+/v1", up.stdout)
    assert url is not None
    try:
        card = httpx.get(f"{url[0]}/models", verify=False, timeout=60).json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("mine", 512)
        again = ("up", "--detach", "--backend", "subprocess", "--model", str(model), "--name", "b")
        second = tandem(tmp_path, *again, *PORTS)
        assert second.returncode == 2
        assert "is running" in second.stderr
    finally:
        down = tandem(tmp_path, "down", "--cluster", "b")
    assert (down.returncode, down.stdout) == (0, "stopped\n"), down.stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url[0]}/models", verify=False)
    assert tandem(tmp_path, "down", "--cluster", "b").returncode == 2


def test_an_output_without_a_limit_is_refused(tmp_path: Path) -> None:
    done = tandem(tmp_path, "up", "--detach", "--set", "observability.logs.target=stdout")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --detach: expected observability.logs.target: files")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_it_serves_stops_the_cluster(tmp_path: Path, signum: signal.Signals) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    options = ("--backend", "subprocess", "--model", str(model), "--name", "b", *PORTS)
    command = [sys.executable, "-m", "cluster", "up", "--detach", *options]
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    state = tmp_path / "state" / "tandem" / "b.json"
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        until_s = time.monotonic() + 60
        while not state.exists():
            assert process.poll() is None, "ended early"
            assert time.monotonic() < until_s, "not started"
            time.sleep(0.01)
        pid = json.loads(state.read_text())["pid"]
        process.send_signal(signum)
        _, said = process.communicate(timeout=90)
    assert (process.returncode, said) == (130, "")
    assert not state.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_second_detached_cluster_leaves_the_output_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with written(of_this_process("b")):
        output = tmp_path / "state" / "tandem" / "b.log"
        output.write_text("ready\n")
        done = tandem(tmp_path, "up", "--detach", "--name", "b")
        assert (done.returncode, output.read_text()) == (2, "ready\n")
    assert done.stderr.startswith("error: name: a cluster named 'b' is starting")


def test_the_version_is_an_option_too(tmp_path: Path) -> None:
    assert tandem(tmp_path, "--version").stdout == tandem(tmp_path, "version").stdout
