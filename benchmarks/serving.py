"""TTFT, TPOT and throughput of a running cluster with a fixed number of concurrent streams (closed loop).

    tandem up &
    python benchmarks/serving.py --streams 8 --requests 64 > today.jsonl
    python benchmarks/serving.py --streams 8 --requests 64 --reference today.jsonl

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. The reference is the same figure of
an earlier run, the ratio is value over reference; both are null without one. Prompts are random tokens of equal length,
so no prefix is cached and runs are comparable. Answers have exactly --output-tokens tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.v1 import inference_pb2, inference_pb2_grpc

FIRST_ORDINARY_TOKEN = 256  # below are special tokens and single bytes in the supported vocabularies


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request, measured at the client. Times in seconds."""

    ttft_s: float
    total_s: float
    output_tokens: int
    handoff_s: float
    kv_bytes_moved: int

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(1, self.output_tokens - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between closest ranks; `values` must not be empty."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def figures_of(samples: Sequence[Sample], failures: int, elapsed_s: float) -> Iterable[tuple[str, float, str]]:
    """Yields (figure, value, unit). Failures are counted in a figure of their own."""
    yield "failed_requests", failures, "requests"
    if not samples:
        return
    yield "ttft_p50", 1000 * percentile([sample.ttft_s for sample in samples], 0.5), "ms"
    yield "ttft_p99", 1000 * percentile([sample.ttft_s for sample in samples], 0.99), "ms"
    yield "tpot_p50", 1000 * percentile([sample.tpot_s for sample in samples], 0.5), "ms"
    yield "tpot_p99", 1000 * percentile([sample.tpot_s for sample in samples], 0.99), "ms"
    yield "handoff_p50", 1000 * percentile([sample.handoff_s for sample in samples], 0.5), "ms"
    yield "kv_moved_mean", statistics.fmean(sample.kv_bytes_moved for sample in samples), "bytes"
    yield "requests_per_s", len(samples) / elapsed_s, "1/s"
    yield "output_tokens_per_s", sum(sample.output_tokens for sample in samples) / elapsed_s, "tokens/s"


async def measure_one(stub: inference_pb2_grpc.InferenceAsyncStub, prompt: Sequence[int], output_tokens: int) -> Sample:
    """Raises grpc.RpcError when the request does not finish."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True),
    )
    started_s = time.perf_counter()
    first_s: float | None = None
    tokens = 0
    timeline = inference_pb2.Timeline()
    async for response in stub.Generate(request):
        if response.HasField("chunk"):
            tokens += len(response.chunk.token_ids)
            if first_s is None and tokens:
                first_s = time.perf_counter()
        elif response.HasField("finished"):
            timeline = response.finished.timeline
    ended_s = time.perf_counter()
    return Sample(
        ttft_s=(first_s or ended_s) - started_s,
        total_s=ended_s - started_s,
        output_tokens=tokens,
        handoff_s=timeline.handoff_s,
        kv_bytes_moved=timeline.kv_bytes_moved,
    )


async def run(options: argparse.Namespace) -> tuple[list[Sample], int, float]:
    """Sends all requests over one connection, `streams` at a time. Returns samples, failures, seconds."""
    samples: list[Sample] = []
    failures = 0
    draw = random.Random(options.seed)
    async with grpc.aio.insecure_channel(options.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        card = (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0]
        prompts = [
            [draw.randrange(FIRST_ORDINARY_TOKEN, card.vocab_tokens) for _ in range(options.prompt_tokens)]
            for _ in range(options.requests + 1)
        ]
        await measure_one(stub, prompts.pop(), options.output_tokens)  # warms links and caches; not counted

        async def stream() -> None:
            nonlocal failures
            while prompts:
                try:
                    samples.append(await measure_one(stub, prompts.pop(), options.output_tokens))
                except grpc.RpcError as error:
                    failures += 1
                    print(f"failed: {error}", file=sys.stderr)

        started_s = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(options.streams)))
        return samples, failures, time.perf_counter() - started_s


def references_in(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return {line["figure"]: line["value"] for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--address", default="127.0.0.1:50051", help="gRPC address of the router")
    parser.add_argument("--streams", type=int, default=4, help="concurrent requests")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", type=Path, help="output of an earlier run")
    options = parser.parse_args()
    references = references_in(options.reference)
    samples, failures, elapsed_s = asyncio.run(run(options))
    shape = f"{options.streams}x{options.prompt_tokens}+{options.output_tokens}"
    for name, value, unit in figures_of(samples, failures, elapsed_s):
        figure = f"serving.{shape}.{name}"
        reference = references.get(figure)
        ratio = value / reference if reference else None
        print(json.dumps({"figure": figure, "value": value, "unit": unit, "reference": reference, "ratio": ratio}))
    return 1 if failures or not samples else 0


if __name__ == "__main__":
    sys.exit(main())
