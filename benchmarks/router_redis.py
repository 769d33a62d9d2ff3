"""Time to first token while Redis is killed, frozen, or emptied repeatedly.

A real router, stub workers that cache and publish prefixes, and a real Redis server. Healthy phases alternate with
faults. Each request counts with its time to first token, minus the prefill worker's time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import uvloop
from redis.asyncio import Redis

from benchmarks.handoff_figures import Figure
from benchmarks.router_bench import MODEL, OTHER_CORES, ChatPrompts, RouterBench, RouterSetup, on_cores, running
from benchmarks.router_clients import RawHttpClient, closed_loop, open_loop
from benchmarks.router_cost import ROUTER, measured
from benchmarks.serving import percentile
from router.testing.index import RedisServer
from tandem.testing.models import write_tiny_llama
from tandem.text.tokenizer import Tokenizer

EMPTIED_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class RedisSizes:
    prompt_tokens: int = 256
    answer_tokens: int = 8
    requests_per_s: float = 40.0
    seconds: float = 3.0  # of a phase
    rounds: int = 7


QUICK = RedisSizes(prompt_tokens=32, answer_tokens=2, requests_per_s=10.0, seconds=0.5, rounds=1)

WORKERS = ("--prefill", "2", "--decode", "4", "--step-ms", "20", "--prefill-tokens-per-s", "100000")


@asynccontextmanager
async def killed(server: RedisServer) -> AsyncIterator[None]:
    server.kill()
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)


@asynccontextmanager
async def frozen(server: RedisServer) -> AsyncIterator[None]:
    """The server accepts connections and never answers."""
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@asynccontextmanager
async def emptied(server: RedisServer) -> AsyncIterator[None]:
    async def empty() -> None:
        async with Redis.from_url(server.url) as redis:
            while True:
                await redis.flushall()
                await asyncio.sleep(EMPTIED_EVERY_S)

    task = asyncio.create_task(empty())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


FAULTS: dict[str, Callable[[RedisServer], AbstractAsyncContextManager[None]]] = {
    "killed": killed,
    "frozen": frozen,
    "emptied": emptied,
}


def figures(sizes: RedisSizes) -> Iterator[Figure]:
    """The time that each fault adds to the p99 of the healthy phase before it. Medians over the rounds, because other
    load on the machine may matter more. The reference is the median of the healthy phases."""
    with tempfile.TemporaryDirectory() as folder, on_cores(OTHER_CORES):
        pairs = uvloop.run(_measure(sizes, Path(folder)))
    reference_ms = median(pair.healthy_ms for rounds in pairs.values() for pair in rounds)
    added_ms = {fault: median(pair.faulty_ms - pair.healthy_ms for pair in rounds) for fault, rounds in pairs.items()}
    for fault, value_ms in added_ms.items():
        yield Figure(f"router.redis_{fault}_ttft_p99_ms", round(value_ms, 2), "ms", round(reference_ms, 2))
    yield Figure("router.redis_lost_ttft_p99_ms", round(max(added_ms.values()), 2), "ms", round(reference_ms, 2))


class PhaseP99(NamedTuple):
    """The p99 of a healthy phase and of the faulty one after it."""

    healthy_ms: float
    faulty_ms: float


async def _measure(sizes: RedisSizes, folder: Path) -> dict[str, list[PhaseP99]]:
    """Returns the rounds by fault."""
    model_dir = write_tiny_llama(folder / "model", vocab=4096, max_positions=4096)
    prompts = ChatPrompts(Tokenizer.load(model_dir), sizes.prompt_tokens)
    server = RedisServer(folder)
    server.start()
    pairs: dict[str, list[PhaseP99]] = {fault: [] for fault in FAULTS}
    try:
        async with running(RouterSetup(model_dir, ROUTER, (*WORKERS, "--redis", server.url), server.url)) as bench:
            client = RawHttpClient(bench.http_port, MODEL, sizes.answer_tokens)

            await closed_loop(client, prompts, 4, 2 * sizes.seconds)  # warm-up, not counted
            for _ in range(sizes.rounds):
                for fault, broken in FAULTS.items():
                    healthy_ms = await _p99_ms(sizes, bench, client, prompts)
                    async with broken(server):
                        faulty_ms = await _p99_ms(sizes, bench, client, prompts)
                    pairs[fault].append(PhaseP99(healthy_ms, faulty_ms))
            await client.close()
    finally:
        server.kill()
    return pairs


async def _p99_ms(sizes: RedisSizes, bench: RouterBench, client: RawHttpClient, prompts: Callable[[], str]) -> float:
    """The p99 of one phase."""
    load = open_loop(client, prompts, sizes.requests_per_s, sizes.seconds)
    return percentile((await measured(bench, load, sizes.seconds)).first_ms, 0.99)
