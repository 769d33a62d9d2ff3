"""What only a GPU can show: pools cross processes by CUDA IPC; copies and digests there are those of host memory."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvtransfer.control import LinkReport, Received, ReceiveFailed, Sent
from kvtransfer.pool.copier_choice import choose_copier
from kvtransfer.pool.cuda_ipc import export_tensor, gpu_index, gpu_uuid
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import DevicePool
from kvtransfer.pool.piece_copier import AnyCopier
from kvtransfer.pool.pool import PoolMap, PoolSpan
from kvtransfer.pool.pools import make_host_staging
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker
from tandem.kvcache.layout import KvPoolLayout
from tandem.testing.models import FaultSettings
from tests.gpu.conftest import DEVICE, NEEDS_CUDA, NEEDS_TWO

pytestmark = pytest.mark.gpu
NAME = str(DEVICE)
LAYOUT = KvPoolLayout(num_blocks=24, layers=3, kv_heads=4, block_tokens=16, head_dim=64, dtype="bfloat16")
PAIRS = [(NAME, NAME), *([("cuda:0", "cuda:1")] if torch.cuda.device_count() > 1 else [])]
LONG = 4700  # tokens: several pieces of 1 MiB and more
TIMEOUT_S = 60.0  # agents load torch and make a context


def pool_of(seed: int, device: str) -> tuple[DevicePool, PoolMap]:
    """A pool on a GPU and the same bytes in host memory."""
    memory = bytearray(np.random.default_rng(seed).integers(0, 256, LAYOUT.pool_bytes, np.uint8).tobytes())
    return DevicePool(LAYOUT, torch.frombuffer(memory, dtype=torch.uint8).to(device)), PoolMap(LAYOUT, memory)


@pytest.fixture(scope="module")
def copier() -> AnyCopier | None:
    """As an agent chooses it, after its check in another process; None on a CPU."""
    if DEVICE.type != "cuda":
        return None
    chosen = choose_copier(LAYOUT, DEVICE)
    assert chosen is not None, "the log says why"
    return chosen


@pytest.mark.parametrize("devices", PAIRS)
@pytest.mark.parametrize("ids", [tuple(range(9)), (3, 4, 5, 9, 1), tuple(range(23, 1, -2))])
@pytest.mark.parametrize("last_block_tokens", [16, 5])
@pytest.mark.parametrize("kernels", [False, True])
def test_copies_and_digests_are_those_of_host_memory(
    devices: tuple[str, str], ids: tuple[int, ...], last_block_tokens: int, kernels: bool, copier: AnyCopier | None
) -> None:
    (source, source_bytes), (target, target_bytes) = pool_of(1, devices[0]), pool_of(2, devices[1])
    if kernels and target.device == DEVICE:
        target._copier = copier
        assert target.launches_from(None) == (copier is not None)
        assert target.launches_from(source) == (copier is not None and source.device == target.device)
    read = PoolSpan(ids, last_block_tokens, 1, 2, 1, 2)
    write = replace(read, block_ids=ids[::-1], head_start=2)
    digest = target.copy_from(source, read, write, target.make_keys(7))
    target_bytes.copy_from(source_bytes, read, write)
    assert np.array_equal(target.words.cpu().numpy().view(np.uint8).reshape(-1), target_bytes.blocks.reshape(-1))
    on_host = DevicePool(LAYOUT, torch.from_numpy(source_bytes.blocks.reshape(-1)))
    assert digest == on_host.digest(read, DigestKeys(7, LAYOUT.head_bytes // 4, torch.device("cpu")))


@NEEDS_CUDA
def test_blocks_beyond_what_32_bits_count_are_copied(copier: AnyCopier | None) -> None:
    """Pools of more than 2^31 words."""
    if torch.cuda.get_device_properties(DEVICE).total_memory < 40 << 30:
        pytest.skip("needs a GPU of 40 GB")
    layout = KvPoolLayout(num_blocks=4200, layers=32, kv_heads=8, block_tokens=16, head_dim=128, dtype="bfloat16")
    assert layout.pool_bytes > 4 << 31
    source, target = (
        DevicePool(layout, torch.zeros(layout.pool_bytes, dtype=torch.uint8, device=DEVICE)) for _ in range(2)
    )
    target._copier = copier
    assert target.launches_from(source)
    source.words[-8:].random_()
    expected = source.words[-8:-1].clone()
    torch.cuda.synchronize()
    keys = target.make_keys(7)
    ids = tuple(range(layout.num_blocks - 8, layout.num_blocks - 1))
    read = PoolSpan(ids, layout.block_tokens, 0, layout.layers, 0, layout.kv_heads)
    digest = target.copy_from(source, read, replace(read, block_ids=tuple(each + 1 for each in ids)), keys)
    assert torch.equal(target.words[-7:], expected)
    assert not target.words[:-7].any()
    assert digest == source.digest(read, keys)  # by torch


def test_a_span_goes_over_host_memory_and_back() -> None:
    (source, _), (target, target_bytes) = pool_of(1, NAME), pool_of(2, NAME)
    span = PoolSpan((3, 4, 9), 5, 0, 3, 1, 2)
    size = sum(part.size for part in target_bytes.slices(span))
    staging = make_host_staging(source)
    with source.on_host(span, staging, write=False) as (host, inner, _):
        packed = host.pack(inner, size)
    with target.on_host(span, staging, write=True) as (host, inner, _):
        host.unpack(packed, inner)
    keys = target.make_keys(1)
    assert target.digest(span, keys) == source.digest(span, keys)


@NEEDS_CUDA
def test_a_gpu_is_found_by_its_uuid() -> None:
    for index in range(torch.cuda.device_count()):
        assert gpu_index(gpu_uuid(index)) == index


READER = """
import sys, msgspec, torch
from kvtransfer.control import DeviceMemory
from kvtransfer.pool.cuda_ipc import open_memory
memory = msgspec.json.decode(sys.stdin.buffer.read(), type=DeviceMemory)
opened = open_memory(memory)
print(opened.numel(), int(opened.to(torch.int64).sum().item()), int(opened[0].item()), int(opened[-1].item()))
opened.fill_(7)
torch.cuda.synchronize()
"""


@NEEDS_CUDA
@pytest.mark.parametrize("size", [1 << 20, 64 << 20])
def test_another_process_reads_and_writes_a_tensor_inside_a_larger_allocation(size: int) -> None:
    """Small tensors share an allocation of torch's, so the second has an offset in it."""
    neighbour = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0")
    expected = [size, int(tensor.to(torch.int64).sum().item()), int(tensor[0].item()), int(tensor[-1].item())]
    torch.cuda.synchronize()
    memory = msgspec.json.encode(export_tensor(tensor))
    done = subprocess.run([sys.executable, "-c", READER], input=memory, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    assert [int(word) for word in done.stdout.split()] == expected
    assert int((tensor != 7).sum().item()) == 0
    assert int(neighbour.sum().item()) == 0


@pytest.mark.parametrize("devices", PAIRS)
@pytest.mark.parametrize("digests", [True, False])
def test_blocks_arrive_by_cuda_ipc(tmp_path: Path, devices: tuple[str, str], digests: bool) -> None:
    async def check(prefill: FakeWorker, decode: FakeWorker) -> None:
        for seed in range(3):
            await complete(start(prefill, decode, seed))
        report = await prefill.ranks[0].expect(LinkReport, state="ready")
        assert (report.transport, report.reason) == ("mapped", "")

    between(tmp_path, devices, check, digests=digests)


@pytest.mark.parametrize("devices", PAIRS)
@pytest.mark.parametrize("digests", [True, False])
def test_several_prompts_at_once_arrive(tmp_path: Path, devices: tuple[str, str], digests: bool) -> None:
    async def check(prefill: FakeWorker, decode: FakeWorker) -> None:
        await complete(start(prefill, decode, 0))
        handoffs = [start(prefill, decode, seed, LONG, range((seed - 1) * 300, seed * 300)) for seed in range(1, 5)]
        for handoff in handoffs:
            await complete(handoff)

    between(tmp_path, devices, check, digests=digests, num_blocks=1200)


@pytest.mark.parametrize("transport", ["tcp", "process_group"])
@pytest.mark.parametrize("devices", [(NAME, NAME), (NAME, ""), ("", NAME)])
def test_blocks_arrive_over_host_memory(tmp_path: Path, devices: tuple[str, str], transport: str) -> None:
    async def check(prefill: FakeWorker, decode: FakeWorker) -> None:
        await complete(start(prefill, decode, 0))

    between(tmp_path, devices, check, transport=transport)


@NEEDS_TWO
@pytest.mark.parametrize("digests", [True, False])
def test_blocks_arrive_by_nccl(tmp_path: Path, digests: bool) -> None:
    async def check(prefill: FakeWorker, decode: FakeWorker) -> None:
        for seed in range(3):
            await complete(start(prefill, decode, seed))
        report = await prefill.ranks[0].expect(LinkReport, state="ready")
        assert report.transport == "nccl"

    between(tmp_path, ("cuda:0", "cuda:1"), check, transport="nccl", digests=digests)


def test_nccl_between_two_agents_on_one_gpu_carries_blocks_or_says_why_not(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU, after the agents made a communicator; gloo, on a CPU, does not."""

    async def check(prefill: FakeWorker, decode: FakeWorker) -> None:
        rank = prefill.ranks[0]
        states = [rank.expect(LinkReport, state=state, timeout_s=TIMEOUT_S) for state in ("ready", "down", "refused")]
        tasks = [asyncio.ensure_future(state) for state in states]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        report = done.pop().result()
        print(report)
        if report.state == "ready":
            await complete(start(prefill, decode, 0))
        else:
            assert "nccl" in report.reason.lower()

    between(tmp_path, (NAME, NAME), check, transport="nccl")


def test_a_flipped_bit_in_gpu_memory_is_found(tmp_path: Path) -> None:
    faults = FaultSettings(every=1, points=("memory",), kinds=("flip",), limit=1)

    async def check(prefill: FakeWorker, decode: FakeWorker) -> None:
        broken = start(prefill, decode, 0)
        await decode.ranks[0].expect(
            ReceiveFailed, ticket_id=broken.ticket_id, cause="digest_mismatch", timeout_s=TIMEOUT_S
        )
        await complete(start(prefill, decode, 1))

    launcher = ("kvtransfer.testing.agent", "--faults", faults.to_json())
    between(tmp_path, (NAME, NAME), check, launcher=launcher)


def between(
    folder: Path,
    devices: tuple[str, str],
    check: Callable[[FakeWorker, FakeWorker], Coroutine[None, None, None]],
    **options: Any,
) -> None:
    """Runs `check` with a prefill and a decode worker that know each other."""

    async def run() -> None:
        workers: list[FakeWorker] = []
        try:
            for name, device in zip(("prefill-0", "decode-0"), devices, strict=True):
                connects = name == "prefill-0"
                model = FakeModel(layers=4, block_tokens=16, head_dim=64, dtype="bfloat16")
                worker = FakeWorker(folder, name, model, device=device, connects=connects, ttl_s=TIMEOUT_S, **options)
                workers.append(worker)
                await worker.attach()
            workers[0].set_peers_of(workers[1])
            workers[1].set_peers_of(workers[0])
            await check(*workers)
        finally:
            for worker in workers:
                worker.stop()

    asyncio.run(run())


def start(
    prefill: FakeWorker, decode: FakeWorker, seed: int, tokens: int = 155, blocks: range | None = None
) -> Handoff:
    """`blocks`: of both pools, for handoffs at the same time; None: any."""
    handoff = Handoff.make(prefill, decode, tokens=tokens, seed=seed)  # a partial last block
    if blocks is not None:
        drawn = random.Random(seed)
        handoff.source_ids = tuple(drawn.sample(blocks, handoff.kv.blocks))
        handoff.target_ids = tuple(drawn.sample(blocks, handoff.kv.blocks))
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 4)
    handoff.compute(4, handoff.kv.blocks)
    return handoff


async def complete(handoff: Handoff) -> None:
    for rank in handoff.prefill.ranks:
        await rank.expect(Sent, ticket_id=handoff.ticket_id, timeout_s=TIMEOUT_S)
    for rank in handoff.decode.ranks:
        await rank.expect(Received, ticket_id=handoff.ticket_id, timeout_s=TIMEOUT_S)
    assert handoff.arrived()
