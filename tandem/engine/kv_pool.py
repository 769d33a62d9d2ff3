"""A rank's KV pool: the tensor, in memory that the transfer agent can map."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.config.engine import EngineSpec
from tandem.engine.device.copies import to_device
from tandem.errors import InsufficientMemory
from tandem.kvcache.layout import KvPoolLayout, cell_width
from tandem.model.fp8 import FP8

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3": FP8,
}


class KvPool:
    """The pool's memory. `tensor` has `layout.shape`; `with_spare` adds one unused block if `spare`.

    On a CPU it is a memfd, sealed against resizing, so that a process that maps it cannot fault, and freed with its
    last user. On a GPU it is torch's own memory, without a descriptor.
    """

    def __init__(self, layout: KvPoolLayout, device: torch.device, *, spare: bool = False) -> None:
        self.layout = layout
        self.fd: int | None = None
        shape = (layout.num_blocks + spare, *layout.shape[1:])
        if device.type == "cpu":
            size_bytes = shape[0] * layout.block_bytes
            self.fd = _sealed_memfd(size_bytes)
            weakref.finalize(self, os.close, self.fd)
            self._map = mmap.mmap(self.fd, size_bytes)
            self.with_spare: Tensor = torch.frombuffer(self._map, dtype=DTYPES[layout.dtype]).view(shape)
            self.with_spare.zero_()  # allocates every page now rather than in the first request
        else:
            self.with_spare = torch.zeros(shape, dtype=DTYPES[layout.dtype], device=device)
            torch.cuda.synchronize(device)  # the transfer agent may write as soon as it attaches
        self.tensor: Tensor = self.with_spare[: layout.num_blocks]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the first block of each pair to the second. No block is in two pairs but as the first."""
        if pairs:
            sources, targets = to_device(np.array(pairs, dtype=np.int64).T, self.tensor.device)
            raw = self.tensor.view(torch.uint8)  # not all operations are there for fp8
            raw[targets] = raw[sources]


def _sealed_memfd(size_bytes: int) -> int:
    fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def block_layout(spec: EngineSpec, *, layers: int, kv_heads: int, head_dim: int) -> KvPoolLayout:
    """The layout of a pool of one block."""
    dtype = spec.pool_dtype
    return KvPoolLayout(1, layers, kv_heads, spec.block_tokens, cell_width(head_dim, dtype), dtype)


def pool_layout(
    spec: EngineSpec, block: KvPoolLayout, available: int, automatic: int, beside_block: int = 0
) -> KvPoolLayout:
    """The pool's layout, with the configured number of blocks or as many as its memory holds.

    Args:
        available: bytes that the pool may take.
        automatic: bytes that it takes if neither its blocks nor its memory are configured.
        beside_block: bytes that a draft model needs beside each block.

    Raises:
        InsufficientMemory: fewer than two blocks fit, or the pool is larger than `available`.
    """
    wanted = automatic if spec.kv_memory_bytes is None else spec.kv_memory_bytes
    each = block.block_bytes + beside_block
    blocks = spec.kv_blocks or wanted // each
    if blocks < 2:
        raise InsufficientMemory(
            f"engine.kv_memory_bytes: expected at least {2 * each} (two KV blocks), got {wanted}",
            field="engine.kv_memory_bytes",
        )
    if blocks * each > available:
        field = "engine.kv_blocks" if spec.kv_blocks else "engine.kv_memory_bytes"
        raise InsufficientMemory(
            f"{field}: expected a KV pool that fits, got {blocks * each} bytes where {available} are available; "
            "lower it",
            field=field,
        )
    return replace(block, num_blocks=blocks)
