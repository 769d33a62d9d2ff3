"""Overload with ten times the requests that the workers can serve: goodput, and the time to refuse the others.

A real router on its HTTP port, stub workers that prefill one prompt after the other and decode at given rates, and a
client that sends at a constant rate and does not retry. Goodput: requests per second that meet both objectives. Its
peak is measured at rates around the workers' capacity.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.handoff_figures import Figure
from router.app import RouterApp
from router.testing.controller import StubController
from router.testing.stub_worker import StubWorker, until
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.router import ClassSpec, Disaggregation, RouterSpec
from tandem.testing.models import write_tiny_llama
from tandem.v1 import worker_pb2

MODEL = "tiny"
PEAK_RATES = (0.8, 0.9, 1.0, 1.1)  # of the prefill capacity
OVERLOAD = 10.0


@dataclass(frozen=True, slots=True)
class OverloadSizes:
    prefill_workers: int = 2
    prefill_tokens_per_s: int = 500  # of each worker
    prompt_tokens: int = 64
    answer_tokens: int = 8
    token_s: float = 0.01
    ttft_slo_s: float = 2.0
    tpot_slo_s: float = 0.05
    peak_s: float = 15.0  # at each rate
    overload_s: float = 120.0

    @property
    def capacity(self) -> float:
        """Requests per second."""
        return self.prefill_workers * self.prefill_tokens_per_s / self.prompt_tokens


QUICK = OverloadSizes(ttft_slo_s=1.0, peak_s=2.0, overload_s=4.0)


class SerialPrefillWorker(StubWorker):
    """Prefills one prompt after the other at `tokens_per_s` tokens per second."""

    def __init__(self, worker_id: str, role: Role, tokens_per_s: int) -> None:
        super().__init__(worker_id, role, MODEL)
        self._tokens_per_s = tokens_per_s
        self._free_s = 0.0  # when all accepted prompts are computed

    async def _prefill(self, session: Any, work: worker_pb2.Work) -> None:
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s) + len(work.prompt) / self._tokens_per_s
        await asyncio.sleep(self._free_s - now_s)
        await super()._prefill(session, work)


class LoadSample(NamedTuple):
    """`ttft_s` None: refused or failed."""

    status: int
    sent_s: float  # since the load began
    ttft_s: float | None
    total_s: float


class LoadGenerator:
    """Sends streaming completions, each over its own connection, and records the results."""

    def __init__(self, port: int, sizes: OverloadSizes) -> None:
        self._port = port
        self._sizes = sizes
        self._number = 0

    async def run(self, rate: float, seconds: float) -> list[LoadSample]:
        """Sends requests at a constant rate for `seconds`. Returns after the last one has ended."""
        started_s = time.monotonic()
        outcomes: list[LoadSample] = []
        sent = 0
        async with asyncio.TaskGroup() as tasks:
            while (passed_s := time.monotonic() - started_s) < seconds:
                while sent < rate * passed_s:
                    tasks.create_task(self._ask(started_s, outcomes))
                    sent += 1
                await asyncio.sleep(0.002)
        return outcomes

    async def _ask(self, zero_s: float, outcomes: list[LoadSample]) -> None:
        self._number += 1
        sizes = self._sizes
        # The first tokens differ, so no two prompts share a prefix.
        prompt = [3 + self._number % 251, 3 + self._number // 251 % 251, *[70] * (sizes.prompt_tokens - 2)]
        request = {"model": MODEL, "prompt": prompt, "max_tokens": sizes.answer_tokens, "stream": True}
        body = json.dumps(request).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        started_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(head.encode() + body)
            status = int((await reader.readline()).split()[1])
            await reader.readuntil(b"\r\n\r\n")
            ttft_s = None
            while chunk := await reader.read(1 << 16):
                if ttft_s is None and status == 200 and b"data:" in chunk:
                    ttft_s = time.monotonic() - started_s
            outcomes.append(LoadSample(status, started_s - zero_s, ttft_s, time.monotonic() - started_s))
        finally:
            writer.close()


def goodput(outcomes: list[LoadSample], seconds: float, sizes: OverloadSizes) -> float:
    """Goodput of the requests that ended within `seconds`: a queue that drains later is not a sustained rate."""
    return sum(_is_good(each, sizes) for each in outcomes if each.sent_s + each.total_s <= seconds) / seconds


def _is_good(outcome: LoadSample, sizes: OverloadSizes) -> bool:
    if outcome.ttft_s is None:
        return False
    tpot_s = (outcome.total_s - outcome.ttft_s) / (sizes.answer_tokens - 1)
    return outcome.ttft_s <= sizes.ttft_slo_s and tpot_s <= sizes.tpot_slo_s


@asynccontextmanager
async def _router(sizes: OverloadSizes) -> AsyncIterator[RouterApp]:
    """A router with its workers, ready to serve."""
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_tiny_llama(Path(folder), max_positions=2048, eos_token_id=2)
        controller = StubController()
        await controller.start()
        workers: list[StubWorker] = [
            SerialPrefillWorker(f"p{number}", Role.PREFILL, sizes.prefill_tokens_per_s)
            for number in range(sizes.prefill_workers)
        ]
        workers.append(StubWorker("d0", Role.DECODE, MODEL))
        for worker in workers:
            worker.behaviour.answer = lambda prompt: [70] * sizes.answer_tokens
            await worker.start()
        workers[-1].behaviour.token_delay_s = sizes.token_s
        served = ServedModel(
            name=MODEL, model_dir=str(model_dir), model_fingerprint="f", block_tokens=16, max_model_tokens=1024
        )
        spec = RouterSpec(
            http_port=0,
            grpc_port=0,
            disaggregation=Disaggregation.ALWAYS,
            classes=(ClassSpec(name="interactive", ttft_slo_s=sizes.ttft_slo_s),),
            max_prefill_tokens_in_flight=4 * sizes.prompt_tokens,
        )
        launch = RouterLaunch(
            cluster="bench",
            router_id="router-0",
            router=spec,
            models=(served,),
            controller_address=controller.address,
            redis_url=None,
            controller_secret="none",
        )
        app = RouterApp(launch)
        await app.start()
        gc.collect()
        gc.freeze()  # like the router process
        try:
            await controller.set_workers(*workers)
            await until(lambda: app.dispatcher.fleet.count_ready(Role.PREFILL) == sizes.prefill_workers)
            await until(lambda: app.service.ready)
            yield app
        finally:
            await app.close()
            for worker in workers:
                await worker.kill()
            await controller.stop()


async def _measure(sizes: OverloadSizes) -> tuple[float, float, list[LoadSample]]:
    """Returns peak goodput, goodput under overload, and the samples under overload."""
    async with _router(sizes) as app:
        load = LoadGenerator(app.http_port, sizes)
        peak = 0.0
        for rate in PEAK_RATES:
            outcomes = await load.run(rate * sizes.capacity, sizes.peak_s)
            peak = max(peak, goodput(outcomes, sizes.peak_s, sizes))
        outcomes = await load.run(OVERLOAD * sizes.capacity, sizes.overload_s)
        return peak, goodput(outcomes, sizes.overload_s, sizes), outcomes


def figures(sizes: OverloadSizes) -> Iterator[Figure]:
    peak, kept, outcomes = uvloop.run(_measure(sizes))
    refusals_ms = sorted(1000 * each.total_s for each in outcomes if each.status == 429)
    others = {each.status for each in outcomes} - {200, 429}
    if others or not refusals_ms:
        raise RuntimeError(f"overload: expected HTTP 200 and 429 only, and some 429, got also {sorted(others)}")
    yield Figure("router.overload_goodput", round(kept, 2), "requests/s", round(peak, 2), round(kept / peak, 3))
    p99_ms = refusals_ms[min(len(refusals_ms) - 1, round(0.99 * len(refusals_ms)))]
    yield Figure("router.refuse_p99_ms", round(p99_ms, 2), "ms")
