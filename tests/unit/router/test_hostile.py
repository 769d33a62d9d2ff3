"""Hostile clients against a router process, from a process of their own, beside healthy traffic.

What is asserted holds on any machine: healthy requests are answered, right and in time, and nothing is left behind.
How their times compare is printed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from router.testing.bodies import multiplying_bodies
from router.testing.hostile import Attack
from router.testing.site import MODEL, TIMEOUT_S, RouterSite
from tandem.config.router import Disaggregation, RouterSpec
from tandem.text.tokenizer import Tokenizer

MIB = 1 << 20
HEALTHY_AT_ONCE = 4
CLIENT_TIMEOUT_S = 2.0
SOAK = bool(os.environ.get("TANDEM_SOAK"))


class Site(RouterSite):
    """Before workers that give long answers to short prompts, and one healthy client."""

    patience_s = 10 * TIMEOUT_S if SOAK else TIMEOUT_S

    def __init__(self, folder: Path, model_dir: Path) -> None:
        spec = RouterSpec(
            http_port=0,
            grpc_port=0,
            disaggregation=Disaggregation.ALWAYS,
            client_timeout_s=CLIENT_TIMEOUT_S,
            keep_alive_s=CLIENT_TIMEOUT_S,
        )
        super().__init__(folder, model_dir, spec)
        fine = Tokenizer.load(model_dir).encode("fine", add_special_tokens=False)
        for worker in self.workers:
            worker.behaviour.answer = lambda prompt: fine if len(prompt) > 8 else [70] * 1500

    async def start(self) -> None:
        await super().start()
        self.http = httpx.AsyncClient(base_url=self.base_url, timeout=TIMEOUT_S, verify=False)

    async def stop(self) -> None:
        await self.http.aclose()
        await super().stop()

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
        async with asyncio.timeout(self.patience_s):
            while (
                await self.metric("tandem_running_requests") + await self.metric("tandem_queued_requests")
                or any(worker.known for worker in self.workers)
                or self.process.num_fds() > descriptors
            ):
                await asyncio.sleep(0.1)


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path, model_dir)
    await site.start()
    yield site
    await site.stop()


@dataclass(frozen=True)
class Case:
    """`left_open`: so many connections the router may leave open while the clients hold them (None: they do not). A
    gRPC connection stays for a while, its calls end. `rounds`: what the first made room for, the last may use."""

    name: str
    short: int
    long: int
    left_open: int | None
    pace_s: float = 0.02
    rounds: int = 2


CASES = [
    Case("cancel_storm", short=300, long=5000, left_open=None),
    Case("slow_readers", short=12, long=500, left_open=1, pace_s=0.004),
    Case("idle", short=1000, long=5000, left_open=0),
    Case("slowloris", short=200, long=1000, left_open=0),
    Case("rapid_reset", short=2000, long=20000, left_open=None, rounds=6),
]


def ms(times_s: list[float], percent: int) -> float:
    return float(np.percentile(times_s, percent) * 1000)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.acceptance(21, here="12 readers", soak="500")
@pytest.mark.acceptance(22, here="200 connections", soak="1,000")
@pytest.mark.acceptance(35, here="p99 only in the benchmark", soak="20,000 resets, 6 times")
async def test_hostile_clients_harm_nobody_and_leave_nothing(site: Site, case: Case) -> None:
    count = case.long if SOAK else case.short
    for worker in site.workers:
        # Slow readers take as much work as others: for more of them the workers, here in our process, go slower.
        worker.behaviour.token_delay_s = case.pace_s * (count / case.short if case.name == "slow_readers" else 1)
    calm_s = await site.traffic(1.0)
    descriptors = site.process.num_fds()
    grown: list[int] = []
    under_s: list[float] = []
    for _ in range(case.rounds):
        attack = await Attack.begin(case.name, (site.http_port, site.grpc_port), MODEL, count)
        made = asyncio.create_task(attack.made())
        while not made.done():
            under_s += await site.traffic(0.5)
        if case.left_open is not None:
            deadline_s = time.monotonic() + site.patience_s
            while site.process.num_fds() > descriptors + case.left_open:
                assert time.monotonic() < deadline_s, "they are cut off while they hold their ends"
                under_s += await site.traffic(0.5)
        closed = await attack.end()
        assert case.left_open is None or closed >= await made - case.left_open
        await site.at_rest(descriptors)
        grown.append(site.process.memory_info().rss)
    assert await site.traffic(0.5), "it serves as before"
    print(
        f"{case.name} × {count}: healthy p50/p99 {ms(calm_s, 50):.0f}/{ms(calm_s, 99):.0f} ms before, "
        f"{ms(under_s, 50):.0f}/{ms(under_s, 99):.0f} ms meanwhile ({len(under_s)} requests), "
        f"MiB after each round {[size // MIB for size in grown]}"
    )
    assert grown[-1] - grown[-2] < (10 if SOAK else 24) * MIB  # the allocator's plateau takes more than a short run
    assert "Traceback" not in site.log()


@pytest.mark.slow
async def test_clients_that_vanish_with_answers_unread_are_nothing_to_report(site: Site) -> None:
    await site.traffic(0.5)
    descriptors = site.process.num_fds()
    attack = await Attack.begin("slow_readers", (site.http_port, site.grpc_port), MODEL, 40)
    await attack.made()
    await site.traffic(0.5)
    await attack.drop()
    await site.at_rest(descriptors)
    assert "Traceback" not in site.log()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def test_bodies_that_multiply_are_refused_cheaply_and_do_not_hold_up_others(site: Site) -> None:
    for worker in site.workers:
        worker.behaviour.token_delay_s = 0.001
    slowest: list[tuple[float, str]] = []
    lags_s: list[float] = []
    for path, body in multiplying_bodies():
        took_s: list[float] = []
        for _ in range(3):
            started_s = cpu_s(site.process)
            reply = await site.http.post(f"/v1/{path}", content=body)
            took_s.append(cpu_s(site.process) - started_s)
            assert reply.status_code == 400, (body[:60], reply.text)
        slowest.append((min(took_s), f"{path} {body[:50]!r}"))
        refused = asyncio.create_task(site.http.post(f"/v1/{path}", content=body))
        while not refused.done():
            asked_s = time.monotonic()
            assert (await site.http.get("/health")).status_code == 200
            lags_s.append(time.monotonic() - asked_s)
        assert (await refused).status_code == 400
    dearest_s, which = max(slowest)
    print(f"dearest refusal {dearest_s * 1000:.0f} ms of CPU time ({which}), lag p99 {ms(lags_s, 99):.0f} ms")
    assert dearest_s < 0.5
