"""The output lines of the benchmarks, and the sizes of the handoff benchmark."""

from __future__ import annotations

import json
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of output. `ratio`: speed over the limit if there is one, else value over reference."""

    figure: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None

    def line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class HandoffSizes:
    """Bulk figures: KV of Llama-3-8B's shape. Other figures: prompt lengths and repetitions."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    block_tokens: int = 16
    bulk_tokens: int = 4096
    bulk_runs: int = 11
    device_tokens: tuple[int, int, int] = (4096, 32768, 131072)  # of figures of GPUs; the second has a target
    small_runs: int = 500
    small_tokens: int = 16
    ttft_runs: int = 100
    ttft_tokens: int = 256
    exposed_runs: int = 3
    exposed_tokens: int = 2048
    demo_model: bool = True
    peers: int = 200
    peer_handoffs: int = 400
    device: str | None = None  # for the GPU figures; None: the GPU, if there is one
    model: Path | None = None  # folder of the GPU figures' model, written if it is not there; None: a temporary one


QUICK = HandoffSizes(
    layers=2,
    kv_heads=2,
    head_dim=16,
    bulk_tokens=256,
    bulk_runs=1,
    device_tokens=(64, 128, 256),
    small_runs=3,
    ttft_runs=2,
    ttft_tokens=32,
    exposed_runs=1,
    exposed_tokens=64,
    demo_model=False,
    peers=20,
    peer_handoffs=40,
    device="cpu",  # runs the same code as on a GPU
)


async def against_limit(
    name: str, size_bytes: int, runs: int, ours: Callable[[], Awaitable[float]], limit: Callable[[], Awaitable[float]]
) -> Figure:
    """Both functions return seconds. They alternate, so a slow phase affects both. One round warms up."""
    our_s: list[float] = []
    limit_s: list[float] = []
    for run in range(runs + 1):
        times = (await limit(), await ours())
        if run:
            limit_s.append(times[0])
            our_s.append(times[1])
    speed = size_bytes / statistics.median(our_s) / 1e9
    reference = size_bytes / statistics.median(limit_s) / 1e9
    return Figure(name, round(speed, 3), "GB/s", round(reference, 3), round(speed / reference, 3))
