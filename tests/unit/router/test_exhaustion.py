"""A router process whose machine runs out of open files, disk or shared memory says so, serves on and heals."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from router.testing.controller import StubController
from router.testing.stub_worker import StubWorker, until
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.testing.disks import SmallDisk

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 2}
OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"', "sh")


@dataclass
class RouterProcess:
    process: asyncio.subprocess.Process
    port: int
    log: Path
    http: httpx.AsyncClient  # over connections that it keeps

    async def completes(self) -> bool:
        try:
            return (await self.http.post("/v1/completions", json=BODY)).status_code == 200
        except httpx.HTTPError:
            return False

    async def is_exhausted(self, name: str) -> bool:
        text = (await self.http.get("/metrics")).text
        return f'tandem_resource_exhausted{{resource="{name}"}} 1.0' in text

    def said(self, text: str) -> int:
        return self.log.read_text().count(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "router.log"


@pytest.fixture
def before() -> tuple[str, ...]:
    """What starts the router."""
    return ()


@pytest.fixture
async def router(model_dir: Path, tmp_path: Path, log: Path, before: tuple[str, ...]) -> AsyncIterator[RouterProcess]:
    controller = StubController()
    workers = [StubWorker("p0", Role.PREFILL, "tiny"), StubWorker("d0", Role.DECODE, "tiny")]
    await controller.start()
    for worker in workers:
        await worker.start()
    await controller.set_workers(*workers)
    launch = RouterLaunch(
        cluster="test",
        router_id="router-0",
        router=RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS),
        models=(
            ServedModel(
                name="tiny", model_dir=str(model_dir), model_fingerprint="f", block_tokens=16, max_model_tokens=512
            ),
        ),
        controller_address=controller.address,
        redis_url=None,
    )
    (tmp_path / "launch.json").write_text(launch.model_dump_json())
    command = (*before, sys.executable, "-m", "router", "--launch", str(tmp_path / "launch.json"))
    with log.open("ab") as written:
        process = await asyncio.create_subprocess_exec(*command, stderr=written)
    await until(lambda: "router listening" in log.read_text())
    port = port_in(log)
    limits = httpx.Limits(keepalive_expiry=600)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False, limits=limits) as http:
        running = RouterProcess(process, port, log, http)
        await holds(running.completes)
        yield running
    process.terminate()
    assert await process.wait() == 0
    for worker in workers:
        await worker.kill()
    await controller.stop()


def port_in(log: Path) -> int:
    found = re.search(r"http=127.0.0.1:(\d+)", log.read_text())
    assert found is not None
    return int(found[1])


async def holds(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await check():
            await asyncio.sleep(0.05)


@contextmanager
def connections(port: int, number: int) -> Iterator[None]:
    """Held open, as far as the router takes them."""
    with ExitStack() as opened:
        for _ in range(number):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        yield


@pytest.mark.acceptance(24, here="descriptors, a router that serves")
async def test_open_files_that_are_used_up_are_named_and_new_connections_work_when_there_are_some(
    router: RouterProcess,
) -> None:
    used = len(os.listdir(f"/proc/{router.process.pid}/fd"))
    _, hard = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (used + 8, hard))
    with connections(router.port, 100):
        await holds(lambda: router.is_exhausted("open_files"))
        assert await router.completes(), "who is connected is served"
        async with httpx.AsyncClient(timeout=30, verify=False) as another:
            with suppress(httpx.HTTPError):
                answer = await another.get(f"http://127.0.0.1:{router.port}/health")
                assert answer.status_code == 503
    named = f"open files: none of {used + 8} is left, so new connections fail: raise `ulimit -n`"
    await until(lambda: router.said("open files: there is room again") == 1)
    assert router.said(named) == 1, "not once for each connection"
    assert not await router.is_exhausted("open_files")
    async with httpx.AsyncClient(timeout=30, verify=False) as another:
        assert (await another.get(f"http://127.0.0.1:{router.port}/health")).status_code == 200
    resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (hard, hard))


@pytest.mark.acceptance(24, here="descriptors, fewer than a router has open")
async def test_a_router_that_can_accept_nothing_accepts_again(router: RouterProcess) -> None:
    used = len(os.listdir(f"/proc/{router.process.pid}/fd"))
    _, hard = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (used - 4, hard))
    with connections(router.port, 10):
        await until(lambda: router.said("open files: none of") == 1)
        assert await router.completes()
    resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
    async with httpx.AsyncClient(timeout=30, verify=False) as another:
        assert (await another.get(f"http://127.0.0.1:{router.port}/health")).status_code == 200


class TestDisk:
    @pytest.fixture
    def log(self, disk: SmallDisk) -> Path:
        return disk.path / "router.log"

    @pytest.mark.acceptance(24, here="the log's disk, a router that serves")
    async def test_a_full_disk_of_the_log_stops_no_request(self, router: RouterProcess, disk: SmallDisk) -> None:
        disk.fill()
        await holds(lambda: router.is_exhausted("disk"))
        for _ in range(20):
            assert await router.completes()
        disk.free()
        await until(lambda: router.said(f"the disk of {disk.path}: there is room again") == 1)
        assert not await router.is_exhausted("disk")
        assert await router.completes()


class TestSharedMemory:
    @pytest.fixture
    def before(self) -> tuple[str, ...]:
        if os.geteuid() != 0:
            pytest.skip("a /dev/shm of its own needs root")
        return OWN_SHM

    @pytest.mark.acceptance(24, here="/dev/shm, a router that serves")
    async def test_a_full_one_is_named_and_stops_no_request(self, router: RouterProcess) -> None:
        disk = SmallDisk(Path(f"/proc/{router.process.pid}/root/dev/shm"))
        disk.fill()
        await holds(lambda: router.is_exhausted("shared_memory"))
        assert router.said("/dev/shm: full: free space there, or make it larger") == 1
        assert await router.completes()
        disk.free()
        await until(lambda: router.said("/dev/shm: there is room again") == 1)
        assert not await router.is_exhausted("shared_memory")
