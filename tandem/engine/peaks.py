"""Peak throughput of a rank's device, measured unless configured: the best of a few matrix products and copies. On a
CPU they are torch's and, in float32, those of our kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.config.engine import EngineSpec
from tandem.engine.kv_pool import DTYPES
from tandem.errors import ConfigError
from tandem.model.ops import is_native
from tandem.native.library import Kernels

ROUNDS = 3
_CPU_WIDTH, _CUDA_WIDTH = 512, 4096
_CPU_COPY_BYTES, _CUDA_COPY_BYTES = 32 << 20, 256 << 20  # small beside a KV pool that may fill most of the memory


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    flops_per_s: float
    memory_bytes_per_s: float


def device_peaks(spec: EngineSpec) -> DevicePeaks:
    """One rank's peaks, as configured or measured (in a fraction of a second)."""
    device = torch.device(spec.device)
    flops, memory = spec.peak_flops_per_s, spec.peak_memory_bytes_per_s
    threads = torch.get_num_threads()
    torch.set_num_threads(spec.threads_per_rank)  # one, where all products are our kernels'
    try:
        peaks = DevicePeaks(
            _flops_per_s(spec, device) if flops is None else flops, _bytes_per_s(device) if memory is None else memory
        )
    finally:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peaks


def _flops_per_s(spec: EngineSpec, device: torch.device) -> float:
    width, dtype = _CUDA_WIDTH if device.type == "cuda" else _CPU_WIDTH, DTYPES[spec.dtype]
    a = torch.ones(width, width, device=device, dtype=dtype)
    out = torch.empty_like(a)
    shortest_s = _shortest_s(device, lambda: torch.mm(a, a, out=out))
    if is_native(dtype, device) and spec.kernels != "torch":
        try:
            kernels = Kernels(spec.threads_per_rank)
        except ConfigError:
            pass  # the engine has said why
        else:
            shortest_s = min(shortest_s, _shortest_s(device, lambda: kernels.linear_dense(a, a, None)))
    return 2.0 * width**3 / shortest_s


def _bytes_per_s(device: torch.device) -> float:
    size = _CUDA_COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * size / _shortest_s(device, lambda: target.copy_(source))  # read and written


def _shortest_s(device: torch.device, work: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(ROUNDS + 1):  # the first is a warm-up
        began_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
