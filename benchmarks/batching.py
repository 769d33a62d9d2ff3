"""Continuous batching against static and dynamic (docs/batching.md): one engine, the same chats at the same times.

    make bench-speculation ARGS="--figure batching"

The chats' lengths are lognormal, with mean and variation of Azure's conversations of 2023 (AzureLLMInferenceTrace_conv
of AzurePublicDataset, CC-BY 4.0; Patel et al., Splitwise, ISCA'24), made shorter for a CPU. Arrivals are Poisson.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.handoff_figures import Figure
from planner.simulator.measurements import RunMeasurements
from planner.simulator.outcome import outcome_fields
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank
from tandem.request import RequestState, SamplingParams
from tandem.testing.engine import EngineDriver, make_request, single_rank

PROMPT, ANSWER = LengthSpec(1155, 0.96, 14_050), LengthSpec(211, 0.77, 1000)
SLO = Slo(2.0, 0.2)  # as MLPerf Inference's Llama-2-70B, server scenario
KINDS = ("continuous", "static", "dynamic")


@dataclass(frozen=True, slots=True)
class Sizes:
    """`load`: arriving answer tokens, as a share of what a full batch gives per second."""

    seconds: float = 40.0
    load: float = 0.7
    batch: int = 16
    shorter_prompts: float = 16.0
    shorter_answers: float = 2.0
    measured_tokens: int = 64


QUICK = Sizes(seconds=0.5, load=5.0, batch=3, shorter_prompts=100.0, shorter_answers=40.0, measured_tokens=4)


def measure_batching(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """Goodput, and answer tokens per second until the last has come: continuous over each of the others."""
    with tempfile.TemporaryDirectory() as folder:

        def rank(kind: str) -> Rank:
            return single_rank(
                model_dir, Path(folder) / kind, batching=kind, max_running_requests=sizes.batch, kv_blocks=1200,
                threads_per_rank=2,
            )  # fmt: skip

        first = rank(KINDS[0])
        trace = chats(sizes, full_batch_tokens_per_s(first, sizes))
        found = {kind: play(first if kind == KINDS[0] else rank(kind), trace) for kind in KINDS}
    good, served = (
        {kind: fields[name] for kind, fields in found.items()} for name in ("goodput_per_s", "served_tokens_per_s")
    )
    for name, values, unit in (("", good, "requests/s"), ("tokens_", served, "tok/s")):
        for kind in KINDS[1:]:
            ratio = values[KINDS[0]] / (values[kind] or 1 / trace.span_s)  # no good request counts as one
            yield Figure(f"batching.{name}continuous_over_{kind}", values[KINDS[0]], unit, values[kind], ratio)
    for kind, fields in found.items():
        yield Figure(f"batching.{kind}_ttft_p90_s", fields["ttft_s"].p90, "s", SLO.ttft_s)


def chats(sizes: Sizes, tokens_per_s: float) -> TrafficTrace:
    prompt, answer = (
        LengthSpec(each.mean / shorter, each.cv, math.ceil(each.most / shorter))
        for each, shorter in ((PROMPT, sizes.shorter_prompts), (ANSWER, sizes.shorter_answers))
    )
    rate = sizes.load * tokens_per_s / answer.mean
    return synthetic_trace(max(8, round(rate * sizes.seconds)), Gamma(rate), prompt, answer, seed=1)


def full_batch_tokens_per_s(rank: Rank, sizes: Sizes) -> float:
    """With prompts. The fastest of four runs, of which the first compiles."""
    length, seconds = round(PROMPT.mean / sizes.shorter_prompts), math.inf
    for run in range(4):
        driver = EngineDriver(rank.engine)
        for number in range(sizes.batch):
            prompt = _prompt(f"full {run} {number}", length, rank.config.vocab_size)
            driver.add(f"full {run} {number}", prompt, SamplingParams(max_tokens=sizes.measured_tokens))
        began_s = time.perf_counter()
        driver.run()
        seconds = min(seconds, time.perf_counter() - began_s)
    return sizes.batch * sizes.measured_tokens / seconds


def play(rank: Rank, trace: TrafficTrace) -> dict[str, Any]:
    """Open loop: a request is due at its time, whatever became of those before."""
    engine, measured = rank.engine, RunMeasurements(trace, SLO)
    prompts = [
        _prompt(str(index), int(tokens), rank.config.vocab_size) for index, tokens in enumerate(trace.prompt_tokens)
    ]
    warm = EngineDriver(engine)
    warm.add("warm", prompts[0], SamplingParams(max_tokens=2))
    warm.run()
    arrivals_s, sent, began_s = [*trace.arrival_s.tolist(), math.inf], 0, time.perf_counter()
    while measured.ended < len(trace):
        now_s = time.perf_counter() - began_s
        while arrivals_s[sent] <= now_s:
            sampling = SamplingParams(seed=sent, max_tokens=int(trace.output_tokens[sent]))
            engine.add(make_request(str(sent), prompts[sent], sampling))
            sent += 1
        collecting_s = engine.collect()
        if engine.has_work:
            _step(engine, measured, began_s)
        else:
            due_s = math.inf if collecting_s is None else now_s + collecting_s
            time.sleep(max(0.0, min(due_s, arrivals_s[sent]) - (time.perf_counter() - began_s)))
    return outcome_fields(trace, SLO, measured)


def _step(engine: TandemEngine, measured: RunMeasurements, began_s: float) -> None:
    result = engine.step()
    now_s = time.perf_counter() - began_s
    for token in result.tokens:
        index = int(token.request_id)
        if np.isnan(measured.first_token_s[index]):
            measured.first_token(index, now_s)
        measured.last_token_s[index] = now_s
    for end in result.ended:
        measured.end(int(end.request_id), RequestState.FINISHED if end.error is None else RequestState.FAILED)


def _prompt(name: str, tokens: int, vocab: int) -> list[int]:
    drawn: list[int] = np.random.default_rng([*name.encode()]).integers(0, vocab, tokens).tolist()
    return drawn
