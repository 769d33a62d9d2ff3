"""The router's cost per request: chats of 256 tokens with streamed answers of 64 tokens, through a handoff."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.handoff_figures import Figure
from benchmarks.proxy_peer import ProxyPeer, peer_running
from benchmarks.router_bench import MODEL, OTHER_CORES, ChatPrompts, RouterBench, RouterSetup, on_cores, running
from benchmarks.router_clients import BenchClient, RawGrpcClient, RawHttpClient, TokenTimes, closed_loop, open_loop
from benchmarks.serving import percentile
from tandem.checkpoint.model_store import resolve
from tandem.config.model import DEMO_MODEL
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import ConfigError
from tandem.testing.models import write_tiny_llama
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CostSizes:
    prompt_tokens: int = 256
    answer_tokens: int = 64
    prefill_workers: int = 2
    decode_workers: int = 4
    step_ms: float = 20.0
    prefill_ms: float = 5.0
    http_streams: int = 600  # concurrent; more than the router can serve without delay
    grpc_streams: int = 200
    seconds: float = 6.0
    rounds: int = 5
    demo_model: bool = True


QUICK = CostSizes(
    prompt_tokens=32,
    answer_tokens=4,
    step_ms=2,
    http_streams=4,
    grpc_streams=4,
    seconds=1.5,
    rounds=1,
    demo_model=False,
)

ROUTER = RouterSpec(
    disaggregation=Disaggregation.ALWAYS,  # the same path for every request
    max_queued_requests=4096,
    max_prefill_tokens_in_flight=1 << 17,  # the stubs' pace must not limit the router
)


@dataclass(frozen=True, slots=True)
class Round:
    cpu_ms: float  # of the router, per request
    rps: float
    first_ms: list[float]  # per request: time to first token, minus the prefill worker's time
    token_ms: list[float]  # per later token: from the worker to the client


def figures(sizes: CostSizes) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, on_cores(OTHER_CORES):
        yield from uvloop.run(_figures(sizes, bench_model(Path(folder), demo=sizes.demo_model)))


def bench_model(folder: Path, *, demo: bool) -> Path:
    """The demo model if it is available, else a tiny one: only the tokenizer and the template are used."""
    if demo:
        with suppress(ConfigError):
            return resolve(DEMO_MODEL)
    return write_tiny_llama(folder / "model", vocab=4096, max_positions=4096)


def setup(sizes: CostSizes, model_dir: Path) -> RouterSetup:
    workers = ("--prefill", str(sizes.prefill_workers), "--decode", str(sizes.decode_workers))
    pace = ("--step-ms", str(sizes.step_ms), "--prefill-ms", str(sizes.prefill_ms))
    return RouterSetup(model_dir, ROUTER, (*workers, *pace))


async def _figures(sizes: CostSizes, model_dir: Path) -> list[Figure]:
    prompts = ChatPrompts(Tokenizer.load(model_dir), sizes.prompt_tokens)
    async with (
        running(setup(sizes, model_dir)) as bench,
        peer_running(sizes.answer_tokens, sizes.step_ms) as peer,
    ):
        http = RawHttpClient(bench.http_port, MODEL, sizes.answer_tokens)
        grpc = RawGrpcClient(bench.grpc_port, MODEL, sizes.answer_tokens)
        try:
            figures = await _measure(sizes, bench, peer, prompts, http, grpc)
        finally:
            await http.close()
            await grpc.close()

    return [*figures, await _without_handoff(replace(sizes, prefill_workers=0), model_dir, prompts)]


async def _without_handoff(sizes: CostSizes, model_dir: Path, prompts: Callable[[], str]) -> Figure:
    async with running(setup(sizes, model_dir)) as bench:
        http = RawHttpClient(bench.http_port, MODEL, sizes.answer_tokens)
        await closed_loop(http, prompts, 8, min(2.0, sizes.seconds))
        rounds = [
            await measured(bench, closed_loop(http, prompts, sizes.http_streams, sizes.seconds), sizes.seconds)
            for _ in range(sizes.rounds)
        ]
        await http.close()
    return Figure("router.cpu_ms_http_local", round(statistics.median(each.cpu_ms for each in rounds), 2), "ms")


async def _measure(
    sizes: CostSizes,
    bench: RouterBench,
    peer: ProxyPeer | None,
    prompts: Callable[[], str],
    http: BenchClient,
    grpc: BenchClient,
) -> list[Figure]:
    for client in (http, grpc):  # warm-up, not counted
        await closed_loop(client, prompts, 8, min(2.0, sizes.seconds))
    full, half, over_grpc, over_http, peers = [], [], [], [], []
    for _ in range(sizes.rounds):
        if peer is not None:
            through_peer = RawHttpClient(peer.port, MODEL, sizes.answer_tokens)
            load = closed_loop(through_peer, prompts, sizes.http_streams, sizes.seconds)
            peers.append((await measured(peer, load, sizes.seconds)).cpu_ms)
            await through_peer.close()
        busy = closed_loop(http, prompts, sizes.http_streams, sizes.seconds)
        full.append(await measured(bench, busy, sizes.seconds))
        at_half = open_loop(http, prompts, full[-1].rps / 2, sizes.seconds)
        half.append(await measured(bench, at_half, sizes.seconds))
        busy = closed_loop(grpc, prompts, sizes.grpc_streams, sizes.seconds)
        over_grpc.append(await measured(bench, busy, sizes.seconds))
        busy = closed_loop(http, prompts, sizes.grpc_streams, sizes.seconds)
        over_http.append(await measured(bench, busy, sizes.seconds))
    median = statistics.median
    ours = round(median(each.cpu_ms for each in full), 2)
    theirs = round(median(peers), 2) if peers else None
    grpc_ms, http_ms = (round(median(each.cpu_ms for each in rounds), 2) for rounds in (over_grpc, over_http))
    beside = [] if theirs is None else [Figure("router.peer", ours, "ms", theirs, round(theirs / ours, 2))]
    return [
        *beside,
        Figure("router.cpu_ms_http", ours, "ms"),
        Figure("router.cpu_ms_grpc", grpc_ms, "ms", http_ms, round(grpc_ms / http_ms, 2)),
        Figure("router.rps_one_core", round(median(each.rps for each in full)), "requests/s"),
        Figure("router.p99_added_ms", round(median(percentile(each.first_ms, 0.99) for each in half), 2), "ms"),
        Figure("router.p99_token_ms", round(median(percentile(each.token_ms, 0.99) for each in half), 2), "ms"),
    ]


async def measured(bench: RouterBench | ProxyPeer, load: Awaitable[Sequence[TokenTimes]], seconds: float) -> Round:
    """`seconds`: how long the load sends requests. CPU and rate are measured over the last two thirds of it, when the
    router has the full load."""
    bench.sent()
    asking = asyncio.ensure_future(load)
    await asyncio.sleep(seconds / 3)
    cpu_s, began_s = bench.cpu_s(), time.monotonic()
    await asyncio.sleep(2 * seconds / 3)
    cpu_s, until_s = bench.cpu_s() - cpu_s, time.monotonic()
    times = await asking
    served = sum(began_s <= each.tokens_s[-1] < until_s for each in times)
    sent = bench.sent()
    first_ms, token_ms = [], []
    for each in times if sent else ():  # no worker reports a peer's requests
        report = sent[each.request_id]
        worker_s = report["tokens_s"][0] - report["taken_s"]
        first_ms.append(1000 * (each.tokens_s[0] - each.sent_s - worker_s))
        token_ms += [1000 * (came - left) for came, left in zip(each.tokens_s, report["tokens_s"], strict=True)][1:]
    return Round(1000 * cpu_s / served, served / (until_s - began_s), first_ms, token_ms)
