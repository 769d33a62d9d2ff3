"""The cost of metrics and tracing: the load of router_cost on two routers, one without metrics and traces, and one with
all metrics and with trace export at the default sampling to a receiver in this process. Both run at the same time on
the same core, so a slow phase of the machine affects both."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.handoff_figures import Figure
from benchmarks.router_bench import MODEL, OTHER_CORES, ChatPrompts, on_cores, running
from benchmarks.router_clients import RawHttpClient, closed_loop
from benchmarks.router_cost import QUICK as COST_QUICK
from benchmarks.router_cost import CostSizes, bench_model, measured, setup
from router.testing.otlp import OtlpReceiver, otlp_receiver
from tandem.config.observability import MetricsSpec, ObservabilitySpec, TracingSpec
from tandem.text.tokenizer import Tokenizer

SIZES = CostSizes(http_streams=50, seconds=2.5, rounds=16)
QUICK = COST_QUICK
OFF = ObservabilitySpec(metrics=MetricsSpec(enabled=False))


def figures(sizes: CostSizes) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, on_cores(OTHER_CORES), otlp_receiver() as receiver:
        yield uvloop.run(_overhead(sizes, bench_model(Path(folder), demo=sizes.demo_model), receiver))


async def _overhead(sizes: CostSizes, model_dir: Path, receiver: OtlpReceiver) -> Figure:
    prompts = ChatPrompts(Tokenizer.load(model_dir), sizes.prompt_tokens)
    observed = ObservabilitySpec(tracing=TracingSpec(otlp_endpoint=receiver.endpoint))
    off, on = (replace(setup(sizes, model_dir), observability=spec) for spec in (OFF, observed))
    async with running(off) as without, running(on) as observing:
        pairs = [(bench, RawHttpClient(bench.http_port, MODEL, sizes.answer_tokens)) for bench in (without, observing)]
        for _, client in pairs:  # warm-up, not counted
            await closed_loop(client, prompts, 8, min(2.0, sizes.seconds))
        shares: list[float] = []
        for _ in range(sizes.rounds):
            loads = (
                measured(bench, closed_loop(client, prompts, sizes.http_streams, sizes.seconds), sizes.seconds)
                for bench, client in pairs
            )
            without_observation, with_observation = await asyncio.gather(*loads)
            shares.append(with_observation.cpu_ms / without_observation.cpu_ms - 1)
        for _, client in pairs:
            await client.close()
    return Figure("obs.overhead_share", round(statistics.median(shares), 4) + 0.0, "share")  # + 0.0: no -0.0
