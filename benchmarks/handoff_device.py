"""Figures of pools in GPU memory: two real agents on one device or two, compared with a copy. None without a GPU."""

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
    async with bulk(sizes, "mapped", digests=False, devices=(name, name)) as plain:
        limit = DeviceCopy(torch.device(name), torch.device(name), plain.size_bytes)
        runs = sizes.bulk_runs
        mapped = await against_limit("handoff.gpu_mapped", plain.size_bytes, runs, plain.seconds, limit.copy_s)
        async with bulk(sizes, "mapped", digests=True, devices=(name, name)) as checked:
            times = [(await plain.seconds(), await checked.seconds()) for _ in range(runs + 1)][1:]
    without_s, with_s = (statistics.median(column) for column in zip(*times, strict=True))
    share = max(0.0, 1 - without_s / with_s)
    return [mapped, Figure("handoff.gpu_digest_share", round(share, 3), "of the time", round(without_s, 5))]


async def gpu_peers(sizes: HandoffSizes) -> list[Figure]:
    """`gpu_peer_mapped` and `gpu_nccl`, from one GPU to another, compared with a copy between them."""
    devices = (sizes.device, sizes.device) if sizes.device else ("cuda:0", "cuda:1")
    if not sizes.device and torch.cuda.device_count() < len(devices):
        return []
    figures = []
    for name, transport in (("handoff.gpu_peer_mapped", "mapped"), ("handoff.gpu_nccl", "nccl")):
        async with bulk(sizes, transport, digests=False, devices=devices) as pair:
            limit = DeviceCopy(torch.device(devices[0]), torch.device(devices[1]), pair.size_bytes)
            figures.append(await against_limit(name, pair.size_bytes, sizes.bulk_runs, pair.seconds, limit.copy_s))
    return figures


class DeviceCopy:
    """Copies the same number of bytes within a device or between two, in one piece."""

    def __init__(self, source: torch.device, target: torch.device, size_bytes: int) -> None:
        self._source = torch.ones(size_bytes, dtype=torch.uint8, device=source)
        self._target = torch.zeros(size_bytes, dtype=torch.uint8, device=target)
        self._wait()

    async def copy_s(self) -> float:
        started_s = time.perf_counter()
        self._target.copy_(self._source)
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        for device in {self._source.device, self._target.device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
