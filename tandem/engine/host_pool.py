"""The host tier's memory on one rank, and the copies between it and the rank's KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.config.engine import EngineSpec
from tandem.engine.block_tables import check_blocks
from tandem.engine.kv_pool import DTYPES, KvPool
from tandem.errors import InsufficientMemory
from tandem.kvcache.host_tier import BlockCopies
from tandem.kvcache.layout import KvPoolLayout
from tandem.machine_memory import available_bytes


class HostPool:
    """Private memory, pinned if the pool is on a GPU."""

    def __init__(self, slots: int, pool: KvPool) -> None:
        self._pool = pool.tensor
        self._slots = torch.zeros((slots, *pool.layout.shape[1:]), dtype=DTYPES[pool.layout.dtype])
        if self._pool.is_cuda:  # pin_memory=True would round up to a power of two
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(cudart.cudaHostRegister(self._slots.data_ptr(), self._slots.nbytes, 0)))

    def copy(self, copies: BlockCopies) -> None:
        """Copies out of the pool, then into it. Returns when both are done."""
        check_blocks(np.array(copies.out_blocks + copies.in_blocks, dtype=np.int64), len(self._pool))
        check_blocks(np.array(copies.out_slots + copies.in_slots, dtype=np.int64), len(self._slots))
        _copy(self._pool, copies.out_blocks, self._slots, copies.out_slots)
        _copy(self._slots, copies.in_slots, self._pool, copies.in_blocks)
        if self._pool.is_cuda:
            torch.cuda.current_stream(self._pool.device).synchronize()


def _copy(source: Tensor, read: Sequence[int], target: Tensor, written: Sequence[int]) -> None:
    # One by one: gathering contiguous blocks into one tensor takes seven times as long (decision 20).
    for one, other in zip(read, written, strict=True):
        target[other].copy_(source[one], non_blocking=True)


def host_slots(spec: EngineSpec, layout: KvPoolLayout) -> int:
    """Number of a rank's host slots, for a pool of `layout`.

    Raises:
        InsufficientMemory: less than one block is configured, or the machine has too little memory for the tier and a
            pool on the CPU.
    """
    wanted = spec.host_kv_memory_bytes
    slots = wanted // layout.block_bytes
    if wanted and not slots:
        raise InsufficientMemory(
            f"engine.host_kv_memory_bytes: expected 0 or at least {layout.block_bytes} (one KV block), got {wanted}",
            field="engine.host_kv_memory_bytes",
        )
    needed = slots * layout.block_bytes + (layout.pool_bytes if spec.device == "cpu" else 0)
    available = available_bytes()
    if slots and needed > available:
        raise InsufficientMemory(
            f"engine.host_kv_memory_bytes: expected a tier that fits, got {wanted} bytes, with the KV pool on the CPU "
            f"{needed}, where {available} are available; lower it",
            field="engine.host_kv_memory_bytes",
        )
    return slots
