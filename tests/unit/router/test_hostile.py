"""Hostile clients against a router process, from a process of their own, beside healthy traffic.

What is asserted holds on any machine: healthy requests are answered, right and in time, and nothing is left behind.
How their times compare is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from router.testing import StubController, StubWorker, until
from router.testing_bodies import multiplying_bodies
from tandem.config import Disaggregation, Role, RouterSpec
from tandem.launch import RouterLaunch, ServedModel
from tandem.tokenizer import Tokenizer

MODEL = "tiny"
TIMEOUT_S = 30.0
MIB = 1 << 20
HEALTHY_AT_ONCE = 4
CLIENT_TIMEOUT_S = 2.0
ROUNDS = 4
SOAK = bool(os.environ.get("TANDEM_SOAK"))


class Site:
    """A router process with stub workers, and one healthy client."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self._launch = folder / "router.json"
        self._model_dir = model_dir
        self._controller = StubController()
        self.workers = [StubWorker(name, role, MODEL, total_blocks=4096) for name, role in (
            ("p0", Role.PREFILL), ("d0", Role.DECODE))]  # fmt: skip
        tokenizer = Tokenizer.load(model_dir)
        fine = tokenizer.encode("fine", add_special_tokens=False)
        for worker in self.workers:
            worker.behaviour.answer = lambda prompt: fine if len(prompt) > 8 else [70] * 1500
        self.http: httpx.AsyncClient

    async def start(self) -> None:
        await self._controller.start()
        for worker in self.workers:
            await worker.start()
        await self._controller.set_workers(*self.workers)
        spec = RouterSpec(
            http_port=0,
            grpc_port=0,
            disaggregation=Disaggregation.ALWAYS,
            client_timeout_s=CLIENT_TIMEOUT_S,
            keep_alive_s=CLIENT_TIMEOUT_S,
        )
        served = ServedModel(name=MODEL, model_dir=str(self._model_dir), model_fingerprint="f", block_tokens=16)
        launch = RouterLaunch(
            cluster="test",
            router_id="router-0",
            router=spec,
            models=(served,),
            controller_address=self._controller.address,
            redis_url=None,
        )
        self._launch.write_text(launch.model_dump_json())
        command = [sys.executable, "-m", "router", "--launch", str(self._launch)]
        with self._launch.with_suffix(".log").open("wb") as log:
            self._router = await asyncio.create_subprocess_exec(*command, stderr=log)
        self.process = psutil.Process(self._router.pid)
        await until(lambda: "router ready" in self.log(), TIMEOUT_S)
        ports = [re.search(rf"{name}=127.0.0.1:(\d+)", self.log()) for name in ("http", "grpc")]
        self.http_port, self.grpc_port = (int(found.group(1)) if found else 0 for found in ports)
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.http_port}", timeout=TIMEOUT_S)

    def log(self) -> str:
        return self._launch.with_suffix(".log").read_text()

    async def stop(self) -> None:
        await self.http.aclose()
        self._router.terminate()
        assert await self._router.wait() == 0
        for worker in self.workers:
            await worker.kill()
        await self._controller.stop()

    async def healthy(self, until_s: float) -> list[float]:
        """Times of requests one after the other, each answered right."""
        took: list[float] = []
        while time.monotonic() < until_s or not took:
            started_s = time.monotonic()
            body = {"model": MODEL, "prompt": "a healthy request of some length"}
            reply = await self.http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["text"] == "fine"
            took.append(time.monotonic() - started_s)
            await asyncio.sleep(0.01)
        return took

    async def traffic(self, seconds: float) -> list[float]:
        until_s = time.monotonic() + seconds
        each = await asyncio.gather(*(self.healthy(until_s) for _ in range(HEALTHY_AT_ONCE)))
        return [took_s for times_s in each for took_s in times_s]

    async def metric(self, name: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    async def at_rest(self, descriptors: int) -> None:
        """Until nothing is on its way and nothing is open that was not before."""
        async with asyncio.timeout(TIMEOUT_S):
            while (
                await self.metric("tandem_running_requests") + await self.metric("tandem_queued_requests")
                or any(worker.known for worker in self.workers)
                or self.process.num_fds() > descriptors
            ):
                await asyncio.sleep(0.1)


class Attack:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def begin(cls, site: Site, name: str, count: int) -> Attack:
        command = ["-m", "router.testing_hostile", name, str(site.http_port), str(site.grpc_port), str(count)]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe))

    async def says(self, word: str) -> int:
        assert self._process.stdout is not None
        async with asyncio.timeout(10 * TIMEOUT_S):
            line = await self._process.stdout.readline()
        return int(json.loads(line)[word])

    async def end(self) -> int:
        """How many of its connections the router had closed."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        closed = await self.says("closed")
        await self._process.wait()
        return closed


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path, model_dir)
    await site.start()
    yield site
    await site.stop()


# The attack, how many in a short run and in a long one, how many connections the router leaves open while the clients
# hold them (None: they do not), and the workers' pace. A gRPC connection stays, its calls end.
ATTACKS = [
    ("cancel_storm", 400, 5000, None, 0.02),
    ("slow_readers", 16, 500, 1, 0.001),
    ("idle", 1000, 5000, 0, 0.02),
    ("slowloris", 200, 1000, 0, 0.02),
    ("rapid_reset", 2000, 20000, None, 0.02),
]


def p99_ms(times_s: list[float]) -> float:
    return float(np.percentile(times_s, 99) * 1000)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "short", "full", "open_after", "pace_s"), ATTACKS, ids=[attack[0] for attack in ATTACKS]
)
async def test_hostile_clients_harm_nobody_and_leave_nothing(
    site: Site, name: str, short: int, full: int, open_after: int | None, pace_s: float
) -> None:
    count = full if SOAK else short
    for worker in site.workers:
        worker.behaviour.token_delay_s = pace_s
    calm_s = await site.traffic(1.0)
    descriptors = site.process.num_fds()
    grown: list[int] = []
    under_s: list[float] = []
    for _ in range(ROUNDS):  # what the first of them made room for is used again
        attack = await Attack.begin(site, name, count)
        made = asyncio.create_task(attack.says("made"))
        while not made.done():
            under_s += await site.traffic(0.5)
        if open_after is not None:
            await site.at_rest(descriptors + open_after)  # while the clients still hold their ends
        closed = await attack.end()
        if open_after is not None:
            assert closed == await made - open_after
        await site.at_rest(descriptors)
        grown.append(site.process.memory_info().rss)
    assert await site.traffic(0.5), "it serves as before"
    print(
        f"{name} × {count}: healthy p99 {p99_ms(calm_s):.1f} ms before, {p99_ms(under_s):.1f} ms meanwhile "
        f"({len(under_s)} requests), MiB after each round {[size // MIB for size in grown]}"
    )
    assert site.process.num_fds() <= descriptors
    assert max(under_s) < 2.0
    assert grown[-1] - grown[-2] < 10 * MIB
    assert "Traceback" not in site.log()


async def test_bodies_that_multiply_are_refused_fast_and_do_not_hold_up_others(site: Site) -> None:
    for worker in site.workers:
        worker.behaviour.token_delay_s = 0.001
    slowest: list[tuple[float, str]] = []
    lags_s: list[float] = []
    for path, body in multiplying_bodies():
        took_s: list[float] = []
        for _ in range(3):
            refused = asyncio.create_task(site.http.post(f"/v1/{path}", content=body))
            started_s = time.monotonic()
            while not refused.done():
                asked_s = time.monotonic()
                assert (await site.http.get("/health")).status_code == 200
                lags_s.append(time.monotonic() - asked_s)
            reply = await refused
            took_s.append(time.monotonic() - started_s)
            assert reply.status_code == 400, (body[:60], reply.text)
        slowest.append((min(took_s), f"{path} {body[:50]!r}"))
    print(f"slowest refusal {max(slowest)[0] * 1000:.0f} ms ({max(slowest)[1]}), lag p99 {p99_ms(lags_s):.0f} ms")
    assert max(slowest)[0] < 0.2
    assert p99_ms(lags_s) < 200
