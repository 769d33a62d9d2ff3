"""The same members in real Ray actors: placed, lost, brought back, and gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem.testing.processes import command_lines

SCRIPT = textwrap.dedent(
    """
    import asyncio, os, pathlib, signal, sys
    import psutil
    from cluster.backends.ray_env import prepare_local_ray
    prepare_local_ray(None)
    from cluster.backends.lease import StaleController
    from cluster.backends.protocol import ANYWHERE, Resources
    from cluster.keeper.members import MemberStart, ProcessSpec
    from cluster.backends.ray_backend import LocalRay, RayBackend, ray
    from cluster.keeper.keeper import Keeper
    from tandem.testing.processes import command_lines

    def gone(pid):
        return not command_lines([pid])

    def groups(name):
        return [each["state"] for each in ray.util.placement_group_table().values() if each["name"] == f"c/{name}"]

    async def main(folder):
        keeper = Keeper(folder / "logs")
        backend = RayBackend("c", "k", folder / "logs", keeper, LocalRay(folder / "ray", 2, 0), 60.0)
        await backend.open()
        running = " ".join(word for child in psutil.Process().children(recursive=True) for word in child.cmdline())
        assert "gcs_server" in running
        assert not [name for name in ("log_monitor.py", "/monitor.py", "dashboard.py") if name in running]
        one, two = await backend.place("worker-0", [Resources(cpus=1), Resources(cpus=1)])
        sleep = ProcessSpec(name="rank", argv=(sys.executable, "-c", "import time; time.sleep(600)"))
        start = MemberStart(run_dir=str(folder / "run"), files={}, processes=(sleep,))
        await one.start(start)
        await two.start(start)
        (first,), (second,) = (await one.running()).processes, (await two.running()).processes
        assert not gone(first.pid) and not gone(second.pid)
        assert psutil.Process(first.pid).nice() == os.nice(0)
        ending = asyncio.create_task(one.wait_end())
        await asyncio.sleep(0.2)
        os.kill(psutil.Process(first.pid).ppid(), signal.SIGKILL)  # the actor itself
        assert "Ray actor" in (await asyncio.wait_for(ending, 60)).reason
        async with asyncio.timeout(60):
            await one.start(start)
        (again,) = (await one.running()).processes
        assert again.pid != first.pid and gone(first.pid)
        assert (await two.running()).processes[0].pid == second.pid
        await one.stop()
        await two.stop()
        waiting = asyncio.create_task(backend.place("worker-1", [Resources(cpus=1)]))
        while not groups("worker-1"):
            await asyncio.sleep(0.1)
        waiting.cancel()  # who asked went away
        await asyncio.gather(waiting, return_exceptions=True)
        while groups("worker-1") != ["REMOVED"]:
            await asyncio.sleep(0.1)
        await one.start(start)
        (process,) = (await one.running()).processes
        latest = await backend._lease_actor.take.remote("k", 0)  # as the next controller of this keeper
        assert not await backend.is_held()
        calls = [
            lambda: one.stop(),
            lambda: one.start(start),
            lambda: backend.place("worker-4", [Resources(cpus=0.1)]),
            lambda: backend.place_local("router-0"),
            lambda: backend.release("worker-0"),
            lambda: backend.reschedule("worker-0", lambda: None, ANYWHERE),
            lambda: backend.release_others((), ()),
        ]
        for call in calls:
            try:
                await call()
                raise AssertionError("a stale controller acted")
            except StaleController:
                pass
        assert not gone(process.pid)
        backend._lease.number = latest
        await backend.release("worker-0")
        while not gone(process.pid):
            await asyncio.sleep(0.1)
        earlier = ray.util.placement_group([{"CPU": 100}], name="c/worker-2", lifetime="detached")  # there is no room
        await asyncio.wait_for(backend.place("worker-2", [Resources(cpus=100)]), 30)
        await backend.release("worker-2")
        await backend.close()
        for pid in (first.pid, second.pid, again.pid):
            assert gone(pid)
        assert not (folder / "ray").exists()
        print("all good")

    asyncio.run(main(pathlib.Path(sys.argv[1])))
    """
)


@pytest.mark.slow
def test_members_live_in_actors_that_ray_brings_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a process of its own: Ray reads its token when it is imported, and keeps it."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))  # Ray's socket paths leave no room for pytest's
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        command = [sys.executable, "-c", SCRIPT, str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout.endswith("all good\n"), done.stdout + done.stderr[-3000:]
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def has(processes: Iterable[psutil.Process], program: str) -> bool:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if program in " ".join(process.cmdline()):
                return True
    return False


@pytest.mark.parametrize(
    "child",
    [
        "gcs_server",
        pytest.param("raylet/raylet", marks=pytest.mark.slow),
        pytest.param("worker.service", marks=pytest.mark.soak_only),
    ],
)
@pytest.mark.slow
def test_ctrl_c_during_a_start_leaves_nothing(tmp_path: Path, child: str) -> None:
    """From the moment on at which this child has been started."""
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    ports = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0")
    command = [sys.executable, "-m", "cluster", "up", *ports]
    said = tmp_path / "said"
    with said.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    while not has(family := children(process.pid), child):
        assert process.poll() is None, said.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) in (0, 130, -signal.SIGINT), said.read_text()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert command_lines(alive) == []
