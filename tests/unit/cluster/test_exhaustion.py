"""A cluster whose machine runs out of disk or open files while it serves says so, and heals when there is room."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cluster.backends.subprocess_backend import SubprocessBackend
from cluster.control.controller import Controller
from cluster.control.record import WorkerState
from cluster.control.worker_slot import WorkerSlot
from cluster.keeper.keeper import Keeper
from cluster.keeper.members import MemberStart, ProcessSpec
from cluster.keeper.supervisor import Supervisor
from cluster.spec.resolve import resolve, with_free_ports
from tandem.config.spec import ClusterSpec
from tandem.testing.disks import SmallDisk, small_disk
from tandem.testing.models import write_tiny_llama

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not holds():
            await asyncio.sleep(0.05)


@contextmanager
def no_open_files() -> Iterator[None]:
    """For this process, until the end of the context."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used, held[0]) + 1, before[1]))
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in held:
            os.close(file)


@pytest.mark.acceptance(24, here="disk, a start of a process")
async def test_a_start_on_a_full_disk_is_named_and_works_later(tmp_path: Path, disk: SmallDisk) -> None:
    start = MemberStart(
        run_dir=str(disk.path / "run"), files={"launch": "x" * 9000}, processes=(ProcessSpec(name="rank", argv=SLEEP),)
    )
    supervisor = Supervisor("m", tmp_path / "logs")
    disk.fill()
    await supervisor.start(start)
    reason = (await supervisor.wait_end()).reason
    assert reason.startswith("m could not be started: the disk is full ("), reason
    assert reason.endswith("): free space there")
    await supervisor.stop()
    disk.free()
    await supervisor.start(start)
    assert (supervisor.end, len(supervisor.processes())) == (None, 1)
    await supervisor.stop()


@pytest.mark.acceptance(24, here="descriptors, a restart of a process")
async def test_a_restart_without_open_files_is_named_and_works_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(
        MemberStart(
            run_dir=str(tmp_path / "run"), files={}, processes=(ProcessSpec(name="agent", argv=SLEEP, restart=True),)
        )
    )
    (before,) = supervisor.processes()
    with no_open_files():
        os.kill(before.pid, signal.SIGKILL)
        await until(lambda: "cannot be restarted yet" in caplog.text)
    assert "m/agent cannot be restarted yet: no open file is left: raise `ulimit -n`" in caplog.text
    await until(lambda: any(each.pid != before.pid for each in supervisor.processes()))
    await supervisor.stop()


def is_told_on(disk: SmallDisk, slot: WorkerSlot) -> bool:
    disk.fill()  # again: the run folder of the worker that died left room
    return "disk is full" in slot.reason


@dataclass
class Served:
    controller: Controller
    disk: SmallDisk


@pytest.fixture
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A small cluster with its logs and run folders on a disk of 2 MB."""
    folder = tmp_path_factory.mktemp("d")  # short enough for unix sockets
    spec = ClusterSpec.model_validate(
        {
            "models": [{"source": str(write_tiny_llama(folder / "tiny")), "engine": {"kv_blocks": 32}}],
            "router": {"http_port": 0, "grpc_port": 0},
            "redis": {"mode": "none"},
            "control": {"admin_port": 0, "backend": "subprocess"},
        }
    )
    cluster = with_free_ports(resolve(spec, lambda what: None))
    try:
        with small_disk(folder / "disk", 2 << 20) as disk:
            logs, run = disk.path / "logs" / "tandem-1", disk.path / "run"
            keeper = Keeper(logs)
            controller = Controller(cluster, SubprocessBackend(keeper), keeper, run, logs)
            try:
                await controller.start()
                await controller.wait_ready(lambda what: None)
                yield Served(controller, disk)
            finally:
                await controller.close()
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.mark.acceptance(24, here="disk, a cluster that serves, and a worker that dies meanwhile")
async def test_a_cluster_serves_on_a_full_disk_and_replaces_a_worker_when_there_is_room(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    controller, disk = served.controller, served.disk
    slot = controller.workers.slots["prefill-0"]
    disk.fill()
    await until(lambda: "full: free space there, or move it with XDG_STATE_HOME" in caplog.text)
    assert caplog.text.count("move it with XDG_STATE_HOME") == 1
    async with httpx.AsyncClient(base_url=f"http://{controller.http_address}", timeout=60, verify=False) as http:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        pid = next(process.pid for process in await slot.processes() if process.name == "rank-0")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: is_told_on(disk, slot))
        assert "free space there" in slot.reason
        assert (await http.post("/v1/completions", json=body)).status_code == 200, "the decode worker computes prompts"
        disk.free()
        await until(lambda: slot.state is WorkerState.READY)
        await controller.wait_ready(lambda what: None)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    await until(lambda: caplog.text.count("there is room again") == 2)
