"""The engine's speed on a GPU, compared with the GPU's limits and with `transformers`. The GPU must be otherwise idle.

    python -m benchmarks.engine_device              # minutes; 16 GB of weights on disk, twice that in GPU memory
    python -m benchmarks.engine_device --quick      # the same code, tiny, on the CPU: checks that it runs

Prints one JSON line per figure, like benchmarks.engine; docs/performance-method.md explains each. Weights are random
bfloat16 in the shape of an 8B model. Limits are measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.device_model import QUICK, DeviceSizes, model_folder
from benchmarks.handoff_figures import Figure
from tandem.config.engine import EngineSpec
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.factory import Rank, build_rank
from tandem.request import SamplingParams
from tandem.testing.engine import EagerRecorder, NoExport, make_request
from tandem.testing.models import random_prompt


@dataclass(slots=True)
class DeviceBench:
    sizes: DeviceSizes
    device: torch.device
    folder: Path
    scratch: Path
    rank: Rank = field(init=False)
    step_s: dict[int, float] = field(default_factory=dict)  # of Tandem, by batch size
    _names: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.rank = self.new_rank()

    def new_rank(self, **options: str) -> Rank:
        sizes, on_cpu = self.sizes, self.device.type == "cpu"
        most = sizes.context + sizes.steps + 16
        defaults = {
            "device": str(self.device),
            "dtype": "bfloat16",
            "kv_blocks": (sizes.batches[-1] * most + sizes.prefill) // 16 + sizes.batches[-1],
            "max_running_requests": sizes.batches[-1],
            "max_step_tokens": sizes.prefill,
            "max_model_tokens": 2 * sizes.prefill,
        }
        return build_rank(
            self.folder, EngineSpec.model_validate(defaults | options), rank=0, size=1,
            rendezvous_file=self.scratch / "group", exporter=NoExport(),
            paged=PagedPath(plain_attention, EagerRecorder()) if on_cpu else None,
        )  # fmt: skip

    def prompt(self, length: int) -> list[int]:
        """A new prompt each time, so no cache has it."""
        return random_prompt(length, self.sizes.vocab, next(self._names))

    def time_s(self, work: Callable[[], object]) -> float:
        """Time of one run, including the work of the device."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written, per second."""
        source = torch.ones(self.sizes.copy_bytes, device=self.device, dtype=torch.uint8)
        target = torch.empty_like(source)
        return 2.0 * source.nbytes / self._median_s(lambda: target.copy_(source))

    def flops_per_s(self) -> float:
        """With random numbers, because a GPU is faster on zeros or ones."""
        width = self.sizes.matrix
        a, b = (torch.randn(width, width, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2.0 * width**3 / self._median_s(lambda: torch.mm(a, b))

    def _median_s(self, work: Callable[[], object]) -> float:
        work()
        return statistics.median(self.time_s(work) for _ in range(2 * self.sizes.rounds + 1))


def decode(bench: DeviceBench) -> Iterator[Figure]:
    """Bytes that a step must read over its time, and the part of that time in which the device was idle."""
    sizes = bench.sizes
    for batch in sizes.batches:
        spans = _timed_replays(bench)
        bench.step_s[batch] = wall_s = _decode_step_s(bench, bench.rank, batch)
        rate = sizes.step_bytes(batch, sizes.context + sizes.steps / 2) / wall_s
        yield _figure(f"engine.gpu_decode_mbu_b{batch}", rate / 1e9, "GB/s", bench.copy_bytes_per_s() / 1e9)
        if busy := spans():
            yield _figure(f"engine.gpu_host_gap_b{batch}", 1e3 * (wall_s - statistics.median(busy)), "ms", 1e3 * wall_s)


def sampled(bench: DeviceBench) -> Iterator[Figure]:
    """Tokens per second of requests that sample, each with a seed. Reference: greedy ones."""
    for batch in bench.sizes.batches:
        step_s = _decode_step_s(bench, bench.rank, batch, temperature=0.8, top_p=0.95)
        greedy_s = bench.step_s.get(batch) or _decode_step_s(bench, bench.rank, batch)
        yield _figure(f"engine.gpu_sampled_ratio_b{batch}", batch / step_s, "tok/s", batch / greedy_s)


def fp8(bench: DeviceBench) -> Iterator[Figure]:
    """Tokens per second of the largest batch with weights and KV in fp8. Reference: bfloat16. On CPUs: only KV."""
    batch = bench.sizes.batches[-1]
    weights = {} if bench.device.type == "cpu" else {"weights": "fp8"}
    step_s = _decode_step_s(bench, bench.new_rank(kv_dtype="fp8", **weights), batch)
    plain_s = bench.step_s.get(batch) or _decode_step_s(bench, bench.rank, batch)
    yield _figure(f"engine.gpu_decode_b{batch}_fp8", batch / step_s, "tok/s", batch / plain_s)


def _decode_step_s(
    bench: DeviceBench, rank: Rank, batch: int, *, temperature: float = 0.0, top_p: float = 1.0
) -> float:
    """The median time of the steps in which all requests decode."""
    engine, most = rank.engine, bench.sizes.steps + 2
    for number in range(batch):
        sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=number, max_tokens=most)
        engine.add(make_request(str(number), bench.prompt(bench.sizes.context), sampling))
    while engine.load().waiting_tokens:
        engine.step()
    walls = []
    while engine.has_work:
        full = engine.load().running_requests == batch
        began = time.perf_counter()
        engine.step()
        if full:
            walls.append(time.perf_counter() - began)
    return statistics.median(walls)


def _timed_replays(bench: DeviceBench) -> Callable[[], list[float]]:
    """Starts timing replayed graph steps on the device. Returns a function that stops and returns their seconds; none
    without graphs."""
    graphs, spans = bench.rank.runner.graphs, []
    if graphs is None or bench.device.type != "cuda":
        return lambda: []

    def timed(replay: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            replay()
            ended.record()
            spans.append((began, ended))

        return run

    plain = dict(graphs.replays)
    graphs.replays.update({size: timed(replay) for size, replay in plain.items()})

    def seconds() -> list[float]:
        graphs.replays.update(plain)
        bench.wait()
        return [began.elapsed_time(ended) / 1e3 for began, ended in spans]

    return seconds


def prefill(bench: DeviceBench) -> Iterator[Figure]:
    """Operations of a prompt over its time to first token."""
    engine, took = bench.rank.engine, []
    for _ in range(bench.sizes.rounds + 1):
        engine.add(make_request("r", bench.prompt(bench.sizes.prefill), SamplingParams(temperature=0.0, max_tokens=1)))
        began = time.perf_counter()
        while engine.has_work:
            engine.step()
        took.append(time.perf_counter() - began)
    rate = bench.sizes.prompt_flops() / statistics.median(took[1:])
    yield _figure("engine.gpu_prefill_mfu", rate / 1e12, "TFLOP/s", bench.flops_per_s() / 1e12)


def beside_transformers(bench: DeviceBench) -> Iterator[Figure]:
    """Tokens per second of all requests together. Runs last, because it may run out of memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.bfloat16)
    model.to(bench.device)
    for batch, step_s in bench.step_s.items():
        theirs = statistics.median(_transformers_steps_s(bench, model, batch))
        yield _figure(f"engine.gpu_decode_b{batch}", batch / step_s, "tok/s", batch / theirs)


@torch.inference_mode()
def _transformers_steps_s(bench: DeviceBench, model: Any, batch: int) -> list[float]:
    ids = torch.tensor([bench.prompt(bench.sizes.context) for _ in range(batch)], device=bench.device)
    past, token = None, ids[:, :0]
    for row in range(0, bench.sizes.context, 256):  # in parts: attention over the whole prompt needs too much memory
        out = model(ids[:, row : row + 256], None, None, past, use_cache=True, logits_to_keep=1)
        past, token = out.past_key_values, out.logits[:, -1:].argmax(dim=-1)
    took = []
    for _ in range(bench.sizes.steps):

        def step(token: Tensor = token, past: Any = past) -> None:
            nonlocal out
            out = model(token, None, None, past, use_cache=True)  # by place: its name changed in transformers 5.24

        took.append(bench.time_s(step))
        past, token = out.past_key_values, out.logits[:, -1:].argmax(dim=-1)
    return took


def _figure(name: str, value: float, unit: str, reference: float) -> Figure:
    return Figure(name, round(value, 6), unit, round(reference, 6), round(value / reference, 6))


FIGURES: dict[str, Callable[[DeviceBench], Iterator[Figure]]] = {
    "decode": decode,
    "prefill": prefill,
    "sampled": sampled,
    "fp8": fp8,
    "transformers": beside_transformers,
}


def main() -> int:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_device", description=summary)
    parser.add_argument(
        "--figure", action="append", choices=FIGURES, help="only these, in this order (may be repeated)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU: checks only that it runs")
    parser.add_argument("--model", type=Path, help="the model's folder, written if it is not there; default: temporary")
    options = parser.parse_args()
    sizes = QUICK if options.quick else DeviceSizes()
    device = torch.device("cpu" if options.quick else "cuda:0")
    with model_folder(options.model, sizes, device) as folder, tempfile.TemporaryDirectory() as scratch:
        bench = DeviceBench(sizes, device, folder, Path(scratch))
        for name in options.figure or FIGURES:
            for figure in FIGURES[name](bench):
                print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
