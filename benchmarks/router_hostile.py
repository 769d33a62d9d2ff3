"""The effect of hostile clients on others: the p99 of healthy chats with and without attackers.

The router has its own core. Workers, healthy clients and attackers share the other cores. Attackers have the lowest
priority there, because real ones run on other machines.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import say
from benchmarks.router_bench import MODEL, OTHER_CORES, ChatPrompts, RouterBench, RouterSetup, on_cores, running
from benchmarks.router_clients import RawHttpClient, TokenTimes, open_loop
from benchmarks.router_cost import ROUTER, bench_model
from benchmarks.serving import percentile
from router.testing.hostile import Attack
from tandem.text.tokenizer import Tokenizer

ATTACKER_NICENESS = 19


@dataclass(frozen=True, slots=True)
class Case:
    """`beside`: well-behaved clients with the same requests, which run in the reference instead of the attack. Empty:
    the reference has healthy chats only."""

    attack: str
    count: int
    beside: str = ""
    step_ms: float = 20.0


@dataclass(frozen=True, slots=True)
class HostileSizes:
    rate: float = 40.0  # healthy requests per second
    prompt_tokens: int = 64
    answer_tokens: int = 16
    seconds: float = 10.0  # of an attack, repeated if it ends earlier
    rounds: int = 3
    cases: tuple[Case, ...] = (
        Case("cancel_storm", 5000),
        Case("slow_readers", 500, beside="readers", step_ms=100.0),
        Case("idle", 5000),
        Case("slowloris", 1000),
        Case("rapid_reset", 20000),
    )
    demo_model: bool = True


QUICK = HostileSizes(20, 16, 4, 0.5, 1, (Case("idle", 50), Case("slow_readers", 8, "readers")), demo_model=False)


def figures(sizes: HostileSizes) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, on_cores(OTHER_CORES):
        model_dir = bench_model(Path(folder), demo=sizes.demo_model)
        for case in sizes.cases:
            yield uvloop.run(_measure(sizes, case, model_dir))


async def _measure(sizes: HostileSizes, case: Case, model_dir: Path) -> Figure:
    stubs = ("--prefill", "2", "--decode", "4", "--step-ms", str(case.step_ms))
    prompts = ChatPrompts(Tokenizer.load(model_dir), sizes.prompt_tokens)
    calm: list[TokenTimes] = []
    under: list[TokenTimes] = []
    async with running(RouterSetup(model_dir, ROUTER, stubs)) as bench:
        client = RawHttpClient(bench.http_port, MODEL, sizes.answer_tokens)
        await open_loop(client, prompts, sizes.rate, min(2.0, sizes.seconds))  # warm-up, not counted
        for _ in range(sizes.rounds):
            for times, attack in ((calm, replace(case, attack=case.beside)), (under, case)):
                async with attacked(bench, attack):
                    times += await open_loop(client, prompts, sizes.rate, sizes.seconds)
        await client.close()
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        say(f"{case.attack}, {name}: first token {first_ms(calm, share):.1f} → {first_ms(under, share):.1f} ms, "
            f"answer {whole_ms(calm, share):.0f} → {whole_ms(under, share):.0f} ms")  # fmt: skip
    value, reference = whole_ms(under, 0.99), whole_ms(calm, 0.99)
    return Figure(
        f"router.{case.attack}_p99_ms", round(value, 1), "ms", round(reference, 1), round(value / reference, 2)
    )


def first_ms(times: list[TokenTimes], share: float) -> float:
    return 1000 * percentile([each.tokens_s[0] - each.sent_s for each in times], share)


def whole_ms(times: list[TokenTimes], share: float) -> float:
    return 1000 * percentile([each.tokens_s[-1] - each.sent_s for each in times], share)


@asynccontextmanager
async def attacked(bench: RouterBench, case: Case) -> AsyncIterator[None]:
    """Within the context attacks run one after the other. An attack that holds connections open runs once."""
    if not case.attack:
        yield
        return
    over = asyncio.Event()
    attacks = asyncio.create_task(_attack(bench, case, over))
    try:
        yield
    finally:
        over.set()
        await attacks


async def _attack(bench: RouterBench, case: Case, over: asyncio.Event) -> None:
    while not over.is_set():
        attack = await Attack.begin(
            case.attack, (bench.http_port, bench.grpc_port), MODEL, case.count, ATTACKER_NICENESS
        )
        if await attack.made():
            await over.wait()
        await attack.drop()
