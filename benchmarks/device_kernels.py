"""What the kernels of a step take on a GPU: each kernel's part of whole steps, and variants of single kernels.

    python -m benchmarks.device_kernels --model FOLDER                 # all; seconds each after the first compilation
    python -m benchmarks.device_kernels --figure attention --limit-s 60

FOLDER holds the model of `benchmarks.engine_device`. `steps` prints a table of kernels by time. The others print one
JSON line for each variant, best first; the reference is the time in which the GPU copies as many bytes, or does as many
operations in a product. The GPU must be otherwise idle. For the sizes of a kernel's programs, see `Tiling`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.device_model import DeviceSizes
from benchmarks.engine_device import DeviceBench
from benchmarks.handoff_figures import Figure
from tandem.engine.attention.triton_attention import Tiling, TritonAttention, tiling_of
from tandem.request import SamplingParams
from tandem.testing.engine import make_request

DEVICE = torch.device("cuda:0")
PAGE = 16
SIZES = DeviceSizes()
ROTATED_BYTES = 400 << 20  # of matrices used in turn, so that no cache holds one
DECODE = [
    Tiling(16, tile, warps, stages, spread)
    for tile, warps, stages, spread in (
        (64, 4, 2, 2.0), (64, 4, 2, 1.0), (64, 4, 2, 4.0), (64, 8, 2, 2.0), (64, 4, 3, 2.0), (128, 4, 2, 2.0),
        (128, 8, 2, 2.0), (32, 4, 2, 2.0),
    )
]  # fmt: skip
PROMPT = [
    Tiling(rows, tile, warps, stages)
    for rows, tile, warps in ((64, 64, 4), (64, 32, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8), (128, 64, 4))
    for stages in (2, 3)
]
CASES = {  # sequences, keys and queries of each
    "decode_b1_2k": (1, 2048, 1),
    "decode_b1_32k": (1, 32768, 1),
    "decode_b8_4k": (8, 4096, 1),
    "decode_b64_2k": (64, 2048, 1),
    "prompt_8k": (1, 8192, 8192),
}
PRODUCTS = [
    (rows, columns, warps)
    for rows in (2, 4, 8, 16)
    for columns in (512, 1024, 2048)
    for warps in (4, 8)
    if rows * columns <= 16384  # registers of a program
]


Work: TypeAlias = Callable[[], object]
Variant: TypeAlias = tuple[str, Callable[[], Work]]  # its name, and what makes and checks it


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_s: float  # read or written
    flops_per_s: float


def main() -> int:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_kernels", description=summary)
    parser.add_argument("--figure", action="append", choices=("steps", "attention", "products"), help="only these")
    parser.add_argument("--model", type=Path, help="folder of the model, for steps")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each figure: no variant starts later")
    options = parser.parse_args()
    chosen = options.figure or ["attention", "products", *(["steps"] if options.model else [])]
    limits = Limits(_copy_bytes_per_s(), _flops_per_s())
    if "products" in chosen:
        _print_all(products(limits, time.monotonic() + options.limit_s))
    if "attention" in chosen:
        _print_all(attention(limits, time.monotonic() + options.limit_s))
    if "steps" in chosen:
        steps(options.model)
    return 0


def _print_all(figures: Iterator[Figure]) -> None:
    for figure in figures:
        print(figure.line(), flush=True)


def _median_s(work: Callable[[], object]) -> float:
    """Of replays, without the host's time for launches."""
    found: float = triton.testing.do_bench_cudagraph(work, rep=5, return_mode="median")
    return found / 1e3


def _copy_bytes_per_s() -> float:
    source = torch.ones(SIZES.copy_bytes, device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _median_s(lambda: target.copy_(source))


def _flops_per_s() -> float:
    a, b = (torch.randn(SIZES.matrix, SIZES.matrix, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * SIZES.matrix**3 / _median_s(lambda: torch.mm(a, b))


def _ranked(name: str, variants: Sequence[Variant], parts: int, limit_s: float, deadline_s: float) -> Iterator[Figure]:
    """One figure for each variant that works, in microseconds for one of its `parts`."""
    found: list[tuple[float, str]] = []
    for number, (variant, make) in enumerate(variants):
        if time.monotonic() > deadline_s:
            print(f"{name}: {len(variants) - number} variants left out", file=sys.stderr)
            break
        try:
            work = make()
            work()
            found.append((_median_s(work) / parts, variant))
        except Exception as error:  # too much shared memory, say
            print(f"{name} {variant}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    for took_s, variant in sorted(found):
        yield Figure(f"{name} {variant}", round(1e6 * took_s, 2), "us", round(1e6 * limit_s, 2), limit_s / took_s)


# --- attention ---------------------------------------------------------------------------------------------------


def attention(limits: Limits, deadline_s: float) -> Iterator[Figure]:
    """One layer's attention over keys of an 8B model. The variant in use is marked."""
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for name, (sequences, keys, queries) in CASES.items():
        work = _Attention(sequences, keys, queries)
        used = tiling_of(one_query=queries == 1, head_dim=SIZES.head_dim)
        variants = [
            (f"{tiling}{' (in use)' if tiling == used else ''}", partial(work.by, TritonAttention(processors, tiling)))
            for tiling in (DECODE if queries == 1 else PROMPT)
        ]
        limit_s = max(work.read_bytes / limits.bytes_per_s, work.flops / limits.flops_per_s)
        yield from _ranked(f"device.attention_{name}", variants, 1, limit_s, deadline_s)


class _Attention:
    def __init__(self, sequences: int, keys: int, queries: int) -> None:
        pages = keys // PAGE
        kv_shape = (sequences * pages, 2, SIZES.kv_heads, PAGE, SIZES.head_dim)
        self._pool = torch.randn(kv_shape, device=DEVICE, dtype=torch.bfloat16)
        self._tables = torch.randperm(sequences * pages, device=DEVICE, dtype=torch.int32).view(sequences, pages)
        self._lengths = torch.full((sequences,), keys, device=DEVICE, dtype=torch.int32)
        self._starts = torch.arange(sequences + 1, device=DEVICE, dtype=torch.int32) * queries
        self._query = torch.randn(sequences * queries, SIZES.heads, SIZES.head_dim, device=DEVICE, dtype=torch.bfloat16)
        self._queries, self._keys = queries, keys
        self.read_bytes = self._pool.nbytes
        pairs = keys * queries / (1 if queries == 1 else 2)  # a query sees half of its prompt's keys
        self.flops = 4.0 * sequences * pairs * SIZES.heads * SIZES.head_dim

    def by(self, kernel: TritonAttention) -> Callable[[], Tensor]:
        return lambda: kernel(
            self._query,
            self._pool[:, 0].transpose(1, 2),
            self._pool[:, 1].transpose(1, 2),
            self._starts,
            None,
            self._queries,
            self._keys if self._queries > 1 else 1 << 17,  # of a recording, which fits any length
            scale=None,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=self._lengths,
            block_table=self._tables,
        )


# --- products ----------------------------------------------------------------------------------------------------


def products(limits: Limits, deadline_s: float) -> Iterator[Figure]:
    """The matrices of a layer times one row, by torch and by a kernel that might replace it."""
    query, key = SIZES.heads * SIZES.head_dim, SIZES.kv_heads * SIZES.head_dim
    shapes = {
        "qkv": (query + 2 * key, SIZES.hidden),
        "out": (SIZES.hidden, query),
        "gate_up": (2 * SIZES.intermediate, SIZES.hidden),
        "down": (SIZES.hidden, SIZES.intermediate),
    }
    for name, (outputs, inputs) in shapes.items():
        size_bytes = 2 * outputs * inputs
        work = _Products(outputs, inputs, max(2, ROTATED_BYTES // size_bytes))
        variants: list[Variant] = [("torch (in use)", lambda work=work: work.by_torch)]  # type: ignore[misc]
        variants += [
            (f"rows {rows} columns {columns} warps {warps}", partial(work.by, rows, columns, warps))
            for rows, columns, warps in PRODUCTS
        ]
        count, limit_s = len(work.matrices), size_bytes / limits.bytes_per_s
        yield from _ranked(f"device.product_{name}", variants, count, limit_s, deadline_s)


class _Products:
    """One row times each of some matrices."""

    def __init__(self, outputs: int, inputs: int, count: int) -> None:
        self._x = torch.randn(1, inputs, device=DEVICE, dtype=torch.bfloat16)
        self.matrices = [torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]

    def by_torch(self) -> None:
        for matrix in self.matrices:
            F.linear(self._x, matrix)

    def by(self, rows: int, columns: int, warps: int) -> Callable[[], None]:
        """Raises ValueError if a result is wrong."""

        def product(matrix: Tensor) -> Tensor:
            outputs, inputs = matrix.shape
            out = torch.empty(1, outputs, device=DEVICE, dtype=torch.bfloat16)
            _times_row[(outputs // rows,)](self._x, matrix, out, inputs, rows=rows, columns=columns, num_warps=warps)
            return out

        ours, right = product(self.matrices[0]).float(), self._x.float() @ self.matrices[0].float().t()
        if not (ours - right).norm() < 0.01 * right.norm():
            raise ValueError("wrong results")

        def work() -> None:
            for matrix in self.matrices:
                product(matrix)

        return work


@triton.jit  # type: ignore[untyped-decorator]
def _times_row(  # type: ignore[no-untyped-def]
    x, matrix, out, inputs: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):  # fmt: skip
    """matrix [outputs, inputs] times x [inputs], `rows` outputs per program."""
    row, column = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, columns)
    at = matrix + row[:, None].to(tl.int64) * inputs + column[None, :]
    sums = tl.zeros([rows, columns], tl.float32)
    for start in range(0, inputs, columns):
        weights = tl.load(at + start, eviction_policy="evict_first").to(tl.float32)
        sums += weights * tl.load(x + start + column).to(tl.float32)[None, :]
    tl.store(out + row, tl.sum(sums, 1).to(out.dtype.element_ty))


# --- steps -------------------------------------------------------------------------------------------------------


def steps(model: Path) -> None:
    """Prints the kernels of decode steps and of a prompt, those with most time first."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = DeviceBench(SIZES, DEVICE, model, Path(scratch))
        engine = bench.rank.engine
        for batch, temperature in ((1, 0.0), (64, 0.0), (1, 0.8), (64, 0.8)):
            for number in range(batch):
                sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=number, max_tokens=60)
                engine.add(make_request(str(number), bench.prompt(SIZES.context), sampling))
            while engine.load().waiting_tokens:
                engine.step()
            for _ in range(4):
                engine.step()
            if engine.load().running_requests != batch:
                raise RuntimeError("some requests have ended before the measurement")
            _print_kernels(f"decode, {batch} requests, temperature {temperature:g}", engine.step, 8)
            while engine.has_work:
                engine.step()
        engine.add(make_request("p", bench.prompt(SIZES.prefill), SamplingParams(temperature=0.0, max_tokens=1)))
        _print_kernels(f"a prompt of {SIZES.prefill} tokens", engine.step, 2)


def _print_kernels(title: str, work: Callable[[], object], count: int, shown: int = 25) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        began_s = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - began_s)
    took_us, times = Counter[str](), Counter[str]()
    for event in profile.events():
        if event.device_type.name == "CUDA":
            took_us[event.name] += event.device_time_total
            times[event.name] += 1
    device_ms = sum(took_us.values()) / 1e3
    print(f"{title}: {wall_ms / count:.3f} ms a step, {device_ms / count:.3f} of them in kernels")
    for name, us in islice(took_us.most_common(), shown):
        print(f"{us / count:10.1f} us {times[name] / count:7.1f} times  {name[:100]}")


if __name__ == "__main__":
    sys.exit(main())
