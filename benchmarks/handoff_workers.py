"""Figures of whole workers: rank, agent and service processes of both roles, driven over the Worker protocol."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.handoff_figures import Figure, Sizes
from benchmarks.serving import FIRST_ORDINARY_TOKEN, percentile
from tandem.config import DEMO_MODEL, EngineSpec
from tandem.errors import WorkerLost
from tandem.kvcache.layout import blocks_for
from tandem.model_store import resolve
from tandem.request import SamplingParams
from tandem.testing import write_tiny_llama
from tandem.v1 import worker_pb2
from worker.testing import HandRouter
from worker.testing_live import Pair, live_pair

WARM_UP_RUNS = 5
TINY_VOCAB = 320
DEMO_VOCAB = 49152
ANSWER = SamplingParams(temperature=0.0, max_tokens=2)


@dataclass(frozen=True, slots=True)
class Passage:
    """One request through a handoff. Seconds since it was sent, at the client; `worker_s`: reserve to join by the
    decode worker's own clock."""

    prefill_sent_s: float
    first_token_s: float
    joined_s: float
    worker_s: float


@asynccontextmanager
async def _workers(sizes: Sizes, prompt_tokens: int, *, demo_model: bool) -> AsyncIterator[Pair]:
    engine = EngineSpec(kv_blocks=64 + 2 * blocks_for(prompt_tokens, 16))
    with tempfile.TemporaryDirectory(prefix="tandem-") as name:
        folder = Path(name)
        model = resolve(DEMO_MODEL) if demo_model else write_tiny_llama(folder / "model", vocab=TINY_VOCAB)
        async with live_pair(folder, Path(model), engine=engine) as pair:
            yield pair


def _prompt(draw: random.Random, tokens: int, vocab: int) -> list[int]:
    return [draw.randrange(FIRST_ORDINARY_TOKEN, vocab) for _ in range(tokens)]


async def _handoff(pair: Pair, hand: HandRouter, prompt: Sequence[int]) -> Passage:
    work = hand.work(prompt, ANSWER)
    started_s = time.perf_counter()
    ticket = await hand.reserve(pair.prefill, pair.decode, work, use_decode_cache=False)
    prefill_sent_s = time.perf_counter()
    first = await hand.prefill(pair.prefill, work, ticket)
    first_token_s = time.perf_counter()
    join = worker_pb2.Join(request_id=work.request_id, first_token=first.token_id)
    pair.decode.send(worker_pb2.RouterFrame(join=join))
    joined: tuple[float, float] | None = None
    while True:
        match await pair.decode.event(work.request_id):
            case worker_pb2.HandoffDone() as done:
                joined = (time.perf_counter(), done.reserve_to_join_s)
            case worker_pb2.Ended():
                break
    if joined is None:
        raise WorkerLost("the request ended without its handoff")
    at_s, worker_s = joined
    return Passage(prefill_sent_s - started_s, first_token_s - started_s, at_s - started_s, worker_s)


async def _alone_s(pair: Pair, hand: HandRouter, prompt: Sequence[int]) -> float:
    """TTFT of the same work on the decode worker alone."""
    work = hand.work(prompt, ANSWER)
    started_s = time.perf_counter()
    pair.decode.send(worker_pb2.RouterFrame(generate=worker_pb2.Generate(work=work)))
    ttft_s: float | None = None
    while not isinstance(event := await pair.decode.event(work.request_id), worker_pb2.Ended):
        if ttft_s is None and isinstance(event, worker_pb2.StepToken):
            ttft_s = time.perf_counter() - started_s
    if ttft_s is None:
        raise WorkerLost("the request ended without a token")
    return ttft_s


async def small(sizes: Sizes) -> list[Figure]:
    """A tiny model, so that the handoff shows and not the model; its prefill of 16 tokens is in the figure."""
    draw, hand = random.Random(0), HandRouter()
    times_ms: list[float] = []
    async with _workers(sizes, sizes.small_tokens, demo_model=False) as pair:
        for run in range(WARM_UP_RUNS + sizes.small_runs):
            passage = await _handoff(pair, hand, _prompt(draw, sizes.small_tokens, TINY_VOCAB))
            if run >= WARM_UP_RUNS:
                times_ms.append(1000 * passage.worker_s)
    return [
        Figure("handoff.small_p50_ms", round(percentile(times_ms, 0.5), 3), "ms"),
        Figure("handoff.small_p99_ms", round(percentile(times_ms, 0.99), 3), "ms"),
    ]


async def ttft_extra(sizes: Sizes) -> list[Figure]:
    """At the client of both workers' streams, one request at a time, the two ways in turns; a tiny model."""
    draw, hand = random.Random(0), HandRouter()
    through_s: list[float] = []
    alone_s: list[float] = []
    async with _workers(sizes, sizes.ttft_tokens, demo_model=False) as pair:
        for run in range(WARM_UP_RUNS + sizes.ttft_runs):
            passage = await _handoff(pair, hand, _prompt(draw, sizes.ttft_tokens, TINY_VOCAB))
            ttft_s = await _alone_s(pair, hand, _prompt(draw, sizes.ttft_tokens, TINY_VOCAB))
            if run >= WARM_UP_RUNS:
                through_s.append(passage.first_token_s)
                alone_s.append(ttft_s)
    through_ms, alone_ms = 1000 * statistics.median(through_s), 1000 * statistics.median(alone_s)
    ratio = round(through_ms / alone_ms, 3)
    return [Figure("handoff.ttft_extra_ms", round(through_ms - alone_ms, 3), "ms", round(alone_ms, 3), ratio)]


async def exposed_share(sizes: Sizes) -> list[Figure]:
    """(first token → joined) / prefill, both at the client: the hops of the two events cancel out, and the join's own
    hop counts. Beside it, push-after-prefill: the same prompt with all its KV in the prefill worker's cache, so that
    nothing hides the push (only its last token is computed, which counts)."""
    draw, hand = random.Random(0), HandRouter()
    shares: list[float] = []
    after_shares: list[float] = []
    vocab = DEMO_VOCAB if sizes.demo_model else TINY_VOCAB
    async with _workers(sizes, sizes.exposed_tokens, demo_model=sizes.demo_model) as pair:
        await _handoff(pair, hand, _prompt(draw, sizes.exposed_tokens, vocab))
        for _ in range(sizes.exposed_runs):
            prompt = _prompt(draw, sizes.exposed_tokens, vocab)
            cold = await _handoff(pair, hand, prompt)
            await asyncio.sleep(0.1)  # until the prefill worker's blocks are released into its cache
            cached = await _handoff(pair, hand, prompt)
            prefill_s = cold.first_token_s - cold.prefill_sent_s
            shares.append((cold.joined_s - cold.first_token_s) / prefill_s)
            after_shares.append((cached.joined_s - cached.prefill_sent_s) / prefill_s)
    share, after = statistics.median(shares), statistics.median(after_shares)
    return [Figure("handoff.exposed_share", round(share, 5), "1", round(after, 5), round(share / after, 3))]
