"""The engine's speed on a GPU, compared with the GPU's limits and with `transformers`. The GPU must be otherwise idle.

    python -m benchmarks.engine_device              # minutes; 16 GB of weights on disk, twice that in GPU memory
    python -m benchmarks.engine_device --quick      # the same code, tiny, on the CPU: checks that it runs

Prints one JSON line per figure, like benchmarks.engine; docs/performance-method.md explains each. Weights are random
bfloat16 in the shape of an 8B model. Limits are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
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
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.handoff_figures import Figure
from tandem.config.spec import EngineSpec
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.device.graph_recorder import EagerRecorder
from tandem.engine.factory import Rank, build_rank
from tandem.request import SamplingParams
from tandem.testing.engine import NoExport, make_request
from tandem.testing.models import random_prompt

ELEMENT_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """DeviceSizes of the model, then of the measurements."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    batches: tuple[int, ...] = (1, 64)
    context: int = 2048
    prefill: int = 8192
    steps: int = 40
    rounds: int = 5
    copy_bytes: int = 2 << 30
    matrix: int = 8192

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices of one layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q": (query, self.hidden), "k": (key, self.hidden), "v": (key, self.hidden)}
        attention["o"] = (self.hidden, query)
        mlp = {"gate": (self.intermediate, self.hidden), "up": (self.intermediate, self.hidden)}
        mlp["down"] = (self.hidden, self.intermediate)
        return {f"self_attn.{name}_proj": shape for name, shape in attention.items()} | {
            f"mlp.{name}_proj": shape for name, shape in mlp.items()
        }

    @property
    def weights(self) -> int:
        """Weights in the matrices that a step multiplies by; it reads only a few rows of the embedding."""
        return self.layers * sum(rows * columns for rows, columns in self.shapes.values()) + self.vocab * self.hidden

    def step_bytes(self, batch: int, context: float) -> float:
        """Bytes that one decode step must read: the weights, and keys and values of every request."""
        kv_token = self.layers * 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES
        return self.weights * ELEMENT_BYTES + batch * context * kv_token

    def prompt_flops(self) -> float:
        """Products with the layers' weights for each token, with the output matrix once, and causal attention."""
        of_layers = 2.0 * (self.weights - self.vocab * self.hidden) * self.prefill
        attention = 2.0 * self.layers * self.heads * self.head_dim * self.prefill**2  # half of two full products
        return of_layers + attention + 2.0 * self.vocab * self.hidden


QUICK = DeviceSizes(2, 64, 128, 4, 2, 16, 300, (1, 3), 24, 96, 6, 1, 1 << 16, 64)


@dataclass(slots=True)
class DeviceBench:
    sizes: DeviceSizes
    device: torch.device
    folder: Path
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
            rendezvous_file=self.folder / "group", exporter=NoExport(),
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
        yield _figure(f"engine.gpu_mbu_b{batch}", rate / 1e9, "GB/s", bench.copy_bytes_per_s() / 1e9)
        if busy := spans():
            yield _figure(f"engine.gpu_host_gap_b{batch}", 1e3 * (wall_s - statistics.median(busy)), "ms", 1e3 * wall_s)


def fp8(bench: DeviceBench) -> Iterator[Figure]:
    """Tokens per second of the largest batch with weights and KV in fp8. Reference: bfloat16. On CPUs: only KV."""
    batch = bench.sizes.batches[-1]
    weights = {} if bench.device.type == "cpu" else {"weights": "fp8"}
    step_s = _decode_step_s(bench, bench.new_rank(kv_dtype="fp8", **weights), batch)
    plain_s = bench.step_s.get(batch) or _decode_step_s(bench, bench.rank, batch)
    yield _figure(f"engine.gpu_decode_b{batch}_fp8", batch / step_s, "tok/s", batch / plain_s)


def _decode_step_s(bench: DeviceBench, rank: Rank, batch: int) -> float:
    """The median time of the steps in which all requests decode."""
    engine = rank.engine
    sampling = SamplingParams(temperature=0.0, max_tokens=bench.sizes.steps + 2)
    for number in range(batch):
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
    yield _figure("engine.gpu_mfu_8k", rate / 1e12, "TFLOP/s", bench.flops_per_s() / 1e12)


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


def write_weights(folder: Path, sizes: DeviceSizes, device: torch.device) -> None:
    """Writes a checkpoint with one file per layer, generated on the device."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "vocab_size": sizes.vocab, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "head_dim": sizes.head_dim,
        "num_key_value_heads": sizes.kv_heads, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "max_position_embeddings": 4 * sizes.prefill, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        wide = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        return wide.mul_(columns**-0.5)

    def norm() -> Tensor:
        return torch.ones(sizes.hidden, device=device, dtype=torch.bfloat16)

    files = {
        "ends": {
            "model.embed_tokens.weight": matrix(sizes.vocab, sizes.hidden),
            "model.norm.weight": norm(),
            "lm_head.weight": matrix(sizes.vocab, sizes.hidden),
        }
    }
    weight_map: dict[str, str] = {}
    for number in range(-1, sizes.layers):
        if number >= 0:
            prefix = f"model.layers.{number}."
            made = {f"{prefix}{name}.weight": matrix(*shape) for name, shape in sizes.shapes.items()}
            norms = ("input_layernorm", "post_attention_layernorm")
            files = {f"layer-{number}": made | {f"{prefix}{name}.weight": norm() for name in norms}}
        for name, tensors in files.items():
            save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


FIGURES: dict[str, Callable[[DeviceBench], Iterator[Figure]]] = {
    "decode": decode,
    "prefill": prefill,
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
    options = parser.parse_args()
    sizes = QUICK if options.quick else DeviceSizes()
    device = torch.device("cpu" if options.quick else "cuda:0")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_weights(folder, sizes, device)
        bench = DeviceBench(sizes, device, folder)
        for name in options.figure or FIGURES:
            for figure in FIGURES[name](bench):
                print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
