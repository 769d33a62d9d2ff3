"""Figures of pools in GPU memory: two real agents on one device or two, compared with a copy. None without a GPU."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import device_model
from benchmarks.handoff_bulk import Bulk, pair_of
from benchmarks.handoff_figures import Figure, HandoffSizes, against_limit
from benchmarks.handoff_workers import RANK_MODULE, exposed_of
from cluster.testing.live import live_pair
from kvtransfer.testing.worker import FakeWorker
from tandem.config.engine import EngineSpec
from tandem.kvcache.layout import blocks_for

DEVICE_RANK = "cluster.testing.device_rank"  # on a CPU, a pool that is used as those on GPUs are
SHARE = 0.45  # of the GPU, for each of two workers
BLOCK_TOKENS = 16


class DeviceBulk(Bulk):
    """Its bytes are made and compared on the device: there are too many for the host."""

    def fill(self) -> None:
        generator = torch.Generator(self._words(self.prefill).device).manual_seed(1)
        self._words(self.prefill).random_(generator=generator)
        self._words(self.decode).zero_()
        self._wait()

    def has_arrived(self) -> bool:
        source, target = self._words(self.prefill), self._words(self.decode)
        pairs = zip(self._source_ids, self._target_ids, strict=True)
        same = [torch.eq(source[mine], target[theirs]).all() for mine, theirs in pairs]
        return bool(torch.stack(same).all().item())

    def _words(self, worker: FakeWorker) -> Tensor:
        """i64 [block, words of a block] of the worker's pool."""
        return worker.ranks[0].memory.on_device().view(torch.int64).view(worker.num_blocks, -1)

    async def copy_s(self) -> float:
        """Time to copy the same number of bytes from pool to pool, in one piece."""
        source, target = (
            self._words(worker).view(-1)[: self.size_bytes // 8] for worker in (self.prefill, self.decode)
        )
        self._wait()
        started_s = time.perf_counter()
        target.copy_(source)
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        for worker in (self.prefill, self.decode):
            device = self._words(worker).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)


async def gpu_mapped(sizes: HandoffSizes) -> list[Figure]:
    """`gpu_mapped` without digests, of three prompts, then with digests, and the share of the time that they add. Where
    the time goes is on stderr."""
    name = sizes.device or ("cuda:0" if torch.cuda.is_available() else None)
    if name is None:
        return []
    runs, tokens = sizes.bulk_runs, sizes.device_tokens
    figures = []
    async with pair_of(sizes, "mapped", tokens[-1], digests=False, devices=(name, name)) as workers:
        for suffix, count in zip(("_4k", "", "_128k"), tokens, strict=True):
            plain = DeviceBulk(*workers, count)
            await plain.check()
            figures.append(await measured(f"handoff.gpu_mapped{suffix}", plain, runs))
        plain = DeviceBulk(*workers, tokens[1])
        async with pair_of(sizes, "mapped", tokens[1], digests=True, devices=(name, name)) as others:
            checked = DeviceBulk(*others, tokens[1])
            await checked.check()
            figures.append(await measured("handoff.gpu_mapped_digest", checked, runs))
            times = [(await plain.seconds(), await checked.seconds()) for _ in range(runs + 1)][1:]
    without_s, with_s = (statistics.median(column) for column in zip(*times, strict=True))
    share = max(0.0, 1 - without_s / with_s)
    return [*figures, Figure("handoff.gpu_digest_share", round(share, 3), "of the time", round(without_s, 5))]


async def measured(name: str, pair: DeviceBulk, runs: int) -> Figure:
    figure = await against_limit(name, pair.size_bytes, runs, pair.seconds, pair.copy_s)
    print(json.dumps({"breakdown": name, **pair.breakdown()}), file=sys.stderr, flush=True)
    return figure


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
    figures, tokens = [], sizes.device_tokens[1]
    for name, transport in (("handoff.gpu_peer_mapped", "mapped"), ("handoff.gpu_nccl", "nccl")):
        async with pair_of(sizes, transport, tokens, digests=False, devices=devices) as workers:
            pair = DeviceBulk(*workers, tokens)
            await pair.check()
            figures.append(await measured(name, pair, sizes.bulk_runs))
    return figures
