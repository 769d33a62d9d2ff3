"""Tandem with vLLM's engine beside vLLM's own servers: a prefill and a decode side, and one server behind a router.

    make bench-vllm                                     every figure
    make bench-vllm ARGS="--figure handoff"

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. `reference` is vLLM's figure, with
the median `ratio` of both in the same turn, or the target. Model, dtype, blocks, batches and threads are the same.

`vllm.handoff_*`: one request at a time, prompts of random words that no side has seen. Time at the client from its
request to the first event with text, and to the second. Tandem's first token comes from its prefill worker. vLLM's
pair discards the token of the prefill server, and the first one comes from the decode server. The client sends both
requests of vLLM's pair itself, so vLLM's time includes no proxy, while Tandem's includes its router. vLLM's pair uses
the faster of two connectors that run on CPUs (`vllm.pair_ttft_*`): NIXL, and vLLM's example, with files in memory.

`vllm.served_b16`: answer tokens per second, 16 streams. `vllm.router_overhead_*`: a router and one worker, minus one
bare server. `vllm.exact_share`: share of greedy answers of Tandem's pair that have the tokens of one bare server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import say
from benchmarks.vllm_client import PeerFailed, Prompts, Server, Side, Stream, in_turns
from benchmarks.vllm_servers import Connector, Setup, handed_off, tandem, vllm_pair, vllm_servers
from tandem.checkpoint.model_store import pull
from tandem.config.model import DEMO_MODEL
from tandem.errors import TandemError

Pairs = Sequence[tuple[float, float]]  # of Tandem and of vLLM, in the same turn

ALONE_THREADS = 1  # of a server that is alone: vLLM leaves one of two cores to its other processes
WORD = re.compile(r"Ġ[a-z]{3,}")  # Ġ: a space, in the vocabulary's file


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens. Not whole blocks and one token: vLLM's example connector does not find their KV."""

    prompts: tuple[int, ...] = (512, 640, 768, 896, 1024)  # one turn
    tokens: int = 16
    choice_turns: int = 2
    turns: int = 6
    streams: int = 16
    served_prompt: int = 256
    served_tokens: int = 64
    served_requests: int = 64  # one turn
    served_turns: int = 3
    alone_requests: int = 10  # one turn
    alone_tokens: int = 32  # of prompt and answer
    exact_requests: int = 32
    exact_tokens: int = 32


QUICK = Sizes((512,), choice_turns=1, turns=1, served_requests=16, served_turns=1, alone_requests=2, exact_requests=4)


@dataclass(slots=True)
class Bench:
    """`words`: tokens for prompts. `connector`: of vLLM's pair; None: not chosen yet."""

    setup: Setup
    sizes: Sizes
    words: Sequence[int]
    connector: Connector | None
    draw: random.Random

    def prompts(self, lengths: Sequence[int]) -> Prompts:
        """Never the same twice."""
        return [self.draw.choices(self.words, k=length) for length in lengths]

    def rounds(self, turns: int, lengths: Sequence[int]) -> list[Prompts]:
        """One more than `turns`, to warm up."""
        return [self.prompts(lengths) for _ in range(1 + turns)]


async def one_by_one(sides: Sequence[Side], rounds: Sequence[Prompts], tokens: int) -> list[list[Stream]]:
    """The answers of each side, each alone."""

    async def turn(side: Side, prompts: Prompts) -> list[Stream]:
        return [await side.stream(prompt, tokens) for prompt in prompts]

    return [[answer for each in turns for answer in each] for turns in await in_turns(sides, rounds, turn)]


async def closed_loop(side: Side, prompts: Prompts, streams: int, tokens: int) -> float:
    """Answer tokens per second, with so many streams at a time until no prompt is left."""
    left, total = list(prompts), 0

    async def stream() -> None:
        nonlocal total
        while left:
            answer = await side.stream(left.pop(), tokens)
            total += answer.tokens

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
    return total / (time.perf_counter() - began_s)


async def choose(bench: Bench) -> AsyncIterator[Figure]:
    """TTFT of vLLM's pair over each connector, unless one is given. Then `bench.connector` is the faster one."""
    if bench.connector is not None:
        return
    found: dict[Connector, float] = {}
    rounds = bench.rounds(bench.sizes.choice_turns, bench.sizes.prompts)
    for connector in Connector:
        try:
            async with vllm_pair(bench.setup, connector) as pair:
                (answers,) = await one_by_one([pair], rounds, bench.sizes.tokens)
        except (PeerFailed, TandemError) as error:
            say(f"vLLM's pair over {connector.value} is left out: {error}")
            continue
        found[connector] = statistics.median(each.ttft_ms for each in answers)
        yield Figure(f"vllm.pair_ttft_{connector.value}_ms", round(found[connector], 1), "ms")
    if not found:
        raise PeerFailed("expected vLLM's pair to run over one of its connectors, and it runs over none")
    bench.connector = min(found, key=lambda each: found[each])


@asynccontextmanager
async def both_pairs(bench: Bench) -> AsyncIterator[list[Side]]:
    """Tandem's pair and vLLM's, with the connector chosen before."""
    connector = bench.connector or Connector.FILES
    say(f"the peer is vLLM's pair over {connector.value}")
    async with tandem(bench.setup, prefill=1) as cluster, vllm_pair(bench.setup, connector) as theirs:
        await handed_off(cluster.grpc_address, bench.prompts([bench.sizes.served_prompt]), 2)
        yield [Server(cluster.http_address), theirs]


async def handoff(bench: Bench) -> AsyncIterator[Figure]:
    async for figure in choose(bench):
        yield figure
    rounds = bench.rounds(bench.sizes.turns, bench.sizes.prompts)
    async with both_pairs(bench) as sides:
        mine, others = await one_by_one(sides, rounds, bench.sizes.tokens)
    pairs = list(zip(mine, others, strict=True))
    ttft = [(ours.ttft_ms, theirs.ttft_ms) for ours, theirs in pairs]
    yield beside("vllm.handoff_ttft_ms", ttft)
    yield beside("vllm.handoff_second_ms", [(ours.second_ms, theirs.second_ms) for ours, theirs in pairs])
    yield judged("vllm.handoff_ttft_ratio", ratio(ttft), "x", 0.8)


async def served(bench: Bench) -> AsyncIterator[Figure]:
    sizes = bench.sizes
    async for figure in choose(bench):
        yield figure
    rounds = bench.rounds(sizes.served_turns, [sizes.served_prompt] * sizes.served_requests)
    async with both_pairs(bench) as sides:
        mine, others = await in_turns(
            sides, rounds, lambda side, prompts: closed_loop(side, prompts, sizes.streams, sizes.served_tokens)
        )
    pairs = list(zip(mine, others, strict=True))
    yield beside("vllm.served_b16", pairs, "tok/s")
    yield judged("vllm.served_b16_ratio", ratio(pairs), "x", 1.0)


async def overhead(bench: Bench) -> AsyncIterator[Figure]:
    sizes, setup = bench.sizes, replace(bench.setup, threads=ALONE_THREADS)
    rounds = bench.rounds(sizes.turns, [sizes.alone_tokens] * sizes.alone_requests)
    async with tandem(setup, prefill=0) as cluster, vllm_servers(setup, None) as (bare,):
        mine, others = await one_by_one([Server(cluster.http_address), bare], rounds, sizes.alone_tokens)
    pairs = list(zip(mine, others, strict=True))
    ttft = beside("vllm.alone_ttft_ms", [(ours.ttft_ms, theirs.ttft_ms) for ours, theirs in pairs])
    token = beside("vllm.alone_token_ms", [(ours.per_token_ms, theirs.per_token_ms) for ours, theirs in pairs])
    yield ttft
    yield token
    yield judged("vllm.router_overhead_ms", ttft.value - (ttft.reference or 0.0), "ms", 5.0)
    yield Figure("vllm.router_overhead_token_ms", round(token.value - (token.reference or 0.0), 3), "ms")


async def exact(bench: Bench) -> AsyncIterator[Figure]:
    sizes = bench.sizes
    prompts = bench.prompts([bench.draw.randint(4, max(sizes.prompts)) for _ in range(sizes.exact_requests)])
    async with vllm_servers(bench.setup, None) as (bare,):
        alone = [await bare.answer(each, sizes.exact_tokens, {"return_token_ids": True}) for each in prompts]
    async with tandem(bench.setup, prefill=1) as cluster:
        found = await handed_off(cluster.grpc_address, prompts, sizes.exact_tokens)
    equal = 0
    for prompt, ours, answer in zip(prompts, found, alone, strict=True):
        theirs = answer.choices[0].token_ids
        equal += ours == theirs
        if ours != theirs:
            say(f"prompt of {len(prompt)} tokens: expected {theirs}, got {ours}")
    yield judged("vllm.exact_share", equal / len(prompts), "", 1.0)


def ratio(pairs: Pairs) -> float:
    return statistics.median(ours / theirs for ours, theirs in pairs)


def beside(name: str, pairs: Pairs, unit: str = "ms") -> Figure:
    ours, theirs = (round(statistics.median(each), 3) for each in zip(*pairs, strict=True))
    return Figure(name, ours, unit, theirs, round(ratio(pairs), 3))


def judged(name: str, value: float, unit: str, target: float) -> Figure:
    return Figure(name, round(value, 3), unit, target, round(value / target, 3))


FIGURES = {"handoff": handoff, "served": served, "overhead": overhead, "exact": exact}


async def run(bench: Bench, names: Sequence[str]) -> None:
    """Ends every process that it starts, also after SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    for name in names:
        async for figure in FIGURES[name](bench):
            print(figure.line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_pair", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=FIGURES, help="only these (may be repeated)")
    parser.add_argument("--connector", choices=[each.value for each in Connector], help="of vLLM's pair")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="of each engine of a pair")
    parser.add_argument("--quick", action="store_true", help="few requests: checks only that it runs")
    options = parser.parse_args()
    setup = Setup(pull(DEMO_MODEL), options.dtype, options.threads)
    vocabulary = json.loads((setup.folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(token for text, token in vocabulary.items() if WORD.fullmatch(text))
    connector = Connector(options.connector) if options.connector else None
    bench = Bench(setup, QUICK if options.quick else Sizes(), words, connector, random.Random(0))
    try:
        asyncio.run(run(bench, options.figure or list(FIGURES)))
    except (PeerFailed, TandemError) as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
