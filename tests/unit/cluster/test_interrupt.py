"""Ctrl-C and SIGTERM at the commands that stay up: heard at every moment, and answered with a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest

from cluster.cli import state_file
from cluster.cli.commands import background
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2, cluster_pb2_grpc


@contextmanager
def start_up(folder: Path, backend: str = "subprocess") -> Iterator[subprocess.Popen[str]]:
    model = folder / "tiny"
    if not model.exists():
        write_tiny_llama(model)
    ports = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0")
    command = [sys.executable, "-m", "cluster", "up", "--backend", backend, "--model", str(model), *ports]
    env = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended before it said {text!r}")


def wait_until_mapped(process: subprocess.Popen[str], library: str) -> None:
    """Until the process, which loads its modules, has come to the `library`."""
    until_s = time.monotonic() + 60
    while library not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, "ended early"
        assert time.monotonic() < until_s, "not loaded"
        time.sleep(0.002)


def catches(process: subprocess.Popen[str], signum: signal.Signals) -> bool:
    """False too once it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except ProcessLookupError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (signum - 1) & 1 for mask in masks)


@pytest.mark.parametrize("library", ["_pydantic_core", "_yaml"])
def test_an_early_interrupt_is_not_lost_in_an_import(tmp_path: Path, library: str) -> None:
    with start_up(tmp_path) as process:
        wait_until_mapped(process, library)
        process.send_signal(signal.SIGINT)
        # -2: while modules loaded. 0: a cluster had begun, and was ended.
        assert process.wait(90) in (0, -signal.SIGINT)


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_cluster_that_is_starting_shows_its_status_and_ends_cleanly(tmp_path: Path, signum: signal.Signals) -> None:
    with start_up(tmp_path) as process:
        wait_for(process, "waiting for workers")
        env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
        shown = subprocess.check_output([sys.executable, "-m", "cluster", "status", "--json"], env=env, timeout=60)
        assert len(json.loads(shown)["workers"]) == 2
        process.send_signal(signum)
        assert process.wait(90) == 0
    assert not list((tmp_path / "state" / "tandem").glob("*.json"))


@pytest.mark.slow
def test_a_cluster_that_is_starting_can_be_stopped_by_command(tmp_path: Path) -> None:
    with start_up(tmp_path) as process:
        wait_for(process, "waiting for workers")
        env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
        subprocess.check_call([sys.executable, "-m", "cluster", "down"], env=env, timeout=90)
        process.wait(90)
    assert not list((tmp_path / "state" / "tandem").glob("*.json"))


class Controller(cluster_pb2_grpc.ClusterServicer):
    async def Shutdown(self, request: Any, context: Any) -> cluster_pb2.ShutdownResponse:
        return cluster_pb2.ShutdownResponse()


async def test_down_tells_while_the_cluster_drains_and_returns_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(background, "NOTICE_S", 0.2)
    server = grpc.aio.server()
    cluster_pb2_grpc.add_ClusterServicer_to_server(Controller(), server)  # type: ignore[abstract]  # one call is made
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    process = await asyncio.create_subprocess_exec("sleep", "60")
    state_file.write(state_file.ClusterState("c", process.pid, state_file.start_of(process.pid), address))
    stopping = asyncio.create_task(asyncio.to_thread(background.run_down, None, None, None))
    told = ""
    try:
        async with asyncio.timeout(30):
            while told.count("still draining after") < 2:
                await asyncio.sleep(0.05)
                told += capsys.readouterr().err
    finally:
        process.kill()
        await process.wait()
    assert await stopping == 0
    await server.stop(None)


@pytest.mark.slow
def test_sigterm_lets_running_answers_end_before_the_cluster_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_ROUTER__DRAIN_TIMEOUT_S", "60")
    monkeypatch.setenv("TANDEM_REDIS__MODE", "none")
    with start_up(tmp_path) as process:
        wait_for(process, "ready in")
        (state,) = (tmp_path / "state" / "tandem").glob("*.json")
        url = f"http://{json.loads(state.read_text())['http']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            streams = [
                client.completions.create(model="tiny", prompt=[5, 6, first], max_tokens=400, stream=True)
                for first in range(6)
            ]
            for stream in streams:
                next(stream)
            process.send_signal(signal.SIGTERM)
            wait_for(process, "stopping")
            with pytest.raises(openai.APIError):
                ask_until_refused(client)
            assert [list(stream)[-1].choices[0].finish_reason for stream in streams] == ["length"] * 6
        assert process.wait(120) == 0


def ask_until_refused(client: openai.OpenAI) -> None:
    """A router answers what it took before it heard of its end."""
    for _ in range(1000):
        client.completions.create(model="tiny", prompt=[5], max_tokens=1)


def test_a_second_interrupt_ends_it_on_the_spot(tmp_path: Path) -> None:
    with start_up(tmp_path) as process:
        wait_for(process, "waiting for workers")
        process.send_signal(signal.SIGINT)
        while catches(process, signal.SIGINT):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) in (0, -signal.SIGINT)
