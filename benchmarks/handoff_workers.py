"""Handoffs between whole workers: rank, agent and service processes of both roles, driven over the Worker protocol."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.handoff_figures import Figure, HandoffSizes
from benchmarks.serving import FIRST_ORDINARY_TOKEN, percentile
from cluster.testing.live import LivePair, live_pair
from tandem.checkpoint.model_store import resolve
from tandem.config.engine import EngineSpec
from tandem.config.model import DEMO_MODEL
from tandem.errors import WorkerLost
from tandem.kvcache.layout import blocks_for
from tandem.request import SamplingParams
from tandem.testing.models import write_tiny_llama
from tandem.v1 import worker_pb2
from worker.testing.session import ManualRouter, WorkerSession

WARM_UP_RUNS = 5
TINY_VOCAB = 320
DEMO_VOCAB = 49152
RANK_MODULE = "cluster.backends.rank_process"
ANSWER = SamplingParams(temperature=0.0, max_tokens=2)


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """Times of one request through a handoff. `ttft_s`: at the client. The others come from the workers' reports;
    `..._at_s` are on the host's monotonic clock, which both workers share."""

    ttft_s: float
    reserve_to_join_s: float
    prefill_began_at_s: float
    last_layer_at_s: float
    joined_at_s: float


@asynccontextmanager
async def _workers(sizes: HandoffSizes, prompt_tokens: int, *, demo_model: bool) -> AsyncIterator[LivePair]:
    engine = EngineSpec(kv_blocks=64 + 2 * blocks_for(prompt_tokens, 16))
    with tempfile.TemporaryDirectory(prefix="tandem-") as name:
        folder = Path(name)
        model = resolve(DEMO_MODEL) if demo_model else write_tiny_llama(folder / "model", vocab=TINY_VOCAB)
        async with live_pair(folder, Path(model), rank_module=RANK_MODULE, engine=engine) as pair:
            yield pair


def _prompt(draw: random.Random, tokens: int, vocab: int) -> list[int]:
    return [draw.randrange(FIRST_ORDINARY_TOKEN, vocab) for _ in range(tokens)]


async def _handoff(pair: LivePair, hand: ManualRouter, prompt: Sequence[int]) -> HandoffTimes:
    work = hand.work(prompt, ANSWER)
    started_s = time.perf_counter()
    ticket = await hand.reserve(pair.prefill, pair.decode, work, use_decode_cache=False)
    first = await hand.prefill(pair.prefill, work, ticket)
    ttft_s = time.perf_counter() - started_s
    join = worker_pb2.Join(request_id=work.request_id, first_token=first.token_id)
    pair.decode.send(worker_pb2.RouterFrame(join=join))
    receiver, sender = await _done(pair.decode, work.request_id), await _done(pair.prefill, work.request_id)
    return HandoffTimes(
        ttft_s,
        receiver.reserve_to_join_s,
        sender.anchor_at_s + sender.sent.computing_s,
        sender.anchor_at_s + sender.sent.last_layer_s,
        receiver.anchor_at_s + receiver.received.joined_s,
    )


async def _done(worker: WorkerSession, request_id: str) -> worker_pb2.HandoffDone:
    """The worker's report of its side of the handoff."""
    while not isinstance(event := await worker.event(request_id), worker_pb2.HandoffDone):
        pass
    return event


async def _alone_s(pair: LivePair, hand: ManualRouter, prompt: Sequence[int]) -> float:
    """TTFT of the same request on the decode worker alone."""
    work = hand.work(prompt, ANSWER)
    started_s = time.perf_counter()
    pair.decode.send(worker_pb2.RouterFrame(generate=worker_pb2.Generate(work=work)))
    ttft_s: float | None = None
    while not isinstance(event := await pair.decode.event(work.request_id), worker_pb2.Ended):
        if ttft_s is None and isinstance(event, worker_pb2.StepToken):
            ttft_s = time.perf_counter() - started_s
    if ttft_s is None:
        raise WorkerLost("expected a token before the end of the request, got none")
    return ttft_s


async def small(sizes: HandoffSizes) -> list[Figure]:
    """Uses a tiny model, so the handoff dominates. The figure includes the prefill of 16 tokens."""
    draw, hand = random.Random(0), ManualRouter()
    times_ms: list[float] = []
    async with _workers(sizes, sizes.small_tokens, demo_model=False) as pair:
        for run in range(WARM_UP_RUNS + sizes.small_runs):
            times = await _handoff(pair, hand, _prompt(draw, sizes.small_tokens, TINY_VOCAB))
            if run >= WARM_UP_RUNS:
                times_ms.append(1000 * times.reserve_to_join_s)
    return [
        Figure("handoff.small_p50_ms", round(percentile(times_ms, 0.5), 3), "ms"),
        Figure("handoff.small_p99_ms", round(percentile(times_ms, 0.99), 3), "ms"),
    ]


async def ttft_extra(sizes: HandoffSizes) -> list[Figure]:
    """TTFT at the client, one request at a time, alternating between handoff and local prefill; a tiny model."""
    draw, hand = random.Random(0), ManualRouter()
    through_s: list[float] = []
    alone_s: list[float] = []
    async with _workers(sizes, sizes.ttft_tokens, demo_model=False) as pair:
        for run in range(WARM_UP_RUNS + sizes.ttft_runs):
            times = await _handoff(pair, hand, _prompt(draw, sizes.ttft_tokens, TINY_VOCAB))
            ttft_s = await _alone_s(pair, hand, _prompt(draw, sizes.ttft_tokens, TINY_VOCAB))
            if run >= WARM_UP_RUNS:
                through_s.append(times.ttft_s)
                alone_s.append(ttft_s)
    through_ms, alone_ms = 1000 * statistics.median(through_s), 1000 * statistics.median(alone_s)
    ratio = round(through_ms / alone_ms, 3)
    return [Figure("handoff.ttft_extra_ms", round(through_ms - alone_ms, 3), "ms", round(alone_ms, 3), ratio)]


async def exposed_share(sizes: HandoffSizes) -> list[Figure]:
    """(last layer computed → joined) / (prefill began → last layer computed). Reference: push after prefill, that is
    the same prompt with all KV in the prefill worker's cache, measured from the start of the push."""
    vocab = DEMO_VOCAB if sizes.demo_model else TINY_VOCAB
    async with _workers(sizes, sizes.exposed_tokens, demo_model=sizes.demo_model) as pair:
        return [await exposed_of(pair, "handoff.exposed_share", sizes.exposed_runs, sizes.exposed_tokens, vocab)]


async def exposed_of(pair: LivePair, name: str, runs: int, tokens: int, vocab: int) -> Figure:
    draw, hand = random.Random(0), ManualRouter()
    shares: list[float] = []
    after_shares: list[float] = []
    for run in range(1 + runs):
        prompt = _prompt(draw, tokens, vocab)
        cold = await _handoff(pair, hand, prompt)
        cached = await _handoff(pair, hand, prompt)
        prefill_s = cold.last_layer_at_s - cold.prefill_began_at_s
        if run:
            shares.append((cold.joined_at_s - cold.last_layer_at_s) / prefill_s)
            after_shares.append((cached.joined_at_s - cached.prefill_began_at_s) / prefill_s)
    share, after = statistics.median(shares), statistics.median(after_shares)
    return Figure(name, round(share, 5), "1", round(after, 5), round(share / after, 3))
