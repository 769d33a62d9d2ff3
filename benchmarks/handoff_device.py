"""Figures of pools in GPU memory: two real agents on one device, compared with a copy on it. None without a GPU."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.handoff_bulk import bulk
from benchmarks.handoff_figures import Figure, HandoffSizes, against_limit


async def gpu_mapped(sizes: HandoffSizes) -> list[Figure]:
    """`gpu_mapped` without digests, and the share of a handoff's time that digests add."""
    name = sizes.device or ("cuda:0" if torch.cuda.is_available() else None)
    if name is None:
        return []
    async with bulk(sizes, "mapped", digests=False, device=name) as plain:
        limit = DeviceCopy(torch.device(name), plain.size_bytes)
        runs = sizes.bulk_runs
        mapped = await against_limit("handoff.gpu_mapped", plain.size_bytes, runs, plain.seconds, limit.copy_s)
        async with bulk(sizes, "mapped", digests=True, device=name) as checked:
            times = [(await plain.seconds(), await checked.seconds()) for _ in range(runs + 1)][1:]
    without_s, with_s = (statistics.median(column) for column in zip(*times, strict=True))
    share = max(0.0, 1 - without_s / with_s)
    return [mapped, Figure("handoff.gpu_digest_share", round(share, 3), "of the time", round(without_s, 5))]


class DeviceCopy:
    """Copies the same number of bytes on the device, in one piece."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)
        self._wait()

    async def copy_s(self) -> float:
        started_s = time.perf_counter()
        self._target.copy_(self._source)
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        if self._source.is_cuda:
            torch.cuda.synchronize(self._source.device)
