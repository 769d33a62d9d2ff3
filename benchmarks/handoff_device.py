"""Figures of pools in GPU memory: two real agents on one device or two, compared with a copy. None without a GPU."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import device_model
from benchmarks.handoff_bulk import bulk
from benchmarks.handoff_figures import Figure, HandoffSizes, against_limit
from benchmarks.handoff_workers import RANK_MODULE, exposed_of
from cluster.testing.live import live_pair
from tandem.config.engine import EngineSpec
from tandem.kvcache.layout import blocks_for

DEVICE_RANK = "cluster.testing.device_rank"  # on a CPU, a pool that is used as those on GPUs are
SHARE = 0.45  # of the GPU, for each of two workers
BLOCK_TOKENS = 16


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


async def gpu_exposed_share(sizes: HandoffSizes) -> list[Figure]:
    """`exposed_share` of 8,192 tokens of an 8B-shaped model in bfloat16, with both workers on one GPU. Raises
    RuntimeError unless blocks are copied from pool to pool."""
    name = sizes.device or ("cuda:0" if torch.cuda.is_available() else None)
    if name is None:
        return []
    shape, on_cpu = device_model.QUICK if sizes.device else device_model.DeviceSizes(), name == "cpu"
    engine = EngineSpec(
        device=name,
        device_share=1.0 if on_cpu else SHARE,
        dtype="bfloat16",
        kv_blocks=64 + 2 * blocks_for(shape.prefill, BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_running_requests=8,
        max_step_tokens=shape.prefill,
        max_model_tokens=2 * shape.prefill,
    )
    rank_module = DEVICE_RANK if on_cpu else RANK_MODULE
    with (
        device_model.model_folder(sizes.model, shape, torch.device(name)) as model,
        tempfile.TemporaryDirectory(prefix="tandem-") as folder,
    ):
        async with live_pair(Path(folder), model, rank_module=rank_module, engine=engine) as pair:
            figure = await exposed_of(pair, "handoff.gpu_exposed_share", sizes.exposed_runs, shape.prefill, shape.vocab)
            links = (await pair.prefill.state()).links
            if {link.transport for link in links} != {"mapped"}:
                raise RuntimeError(f"expected mapped links, got {[(link.transport, link.reason) for link in links]}")
    return [figure]


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
