"""Paged attention by a kernel that reads keys and values in place through block tables.

The kernel is a parameter with the signature of `torch.nn.attention.varlen.varlen_attn`; `paged_kernels.py` chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.block_tables import check_blocks
from tandem.engine.cells import indexable, to_cells
from tandem.engine.device.copies import to_device
from tandem.engine.step import SequenceStep
from tandem.model.decoder import AttentionParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class PagedKernel(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """query [tokens, heads, head_dim]; key, value [pages, page tokens, kv_heads, head_dim], strided, of the same
        dtype or fp8. Other arguments are as in `PagedBatch`.

        A sequence's last query is at its last key. A query sees `window_size[0]` keys before its own, or all if -1, and
        none after. Returns the shape of `query`.
        """
        ...


class StoreKv(Protocol):
    def __call__(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """Writes k and v [tokens, kv_heads, head_dim], strided, to cells of keys and values [blocks, kv_heads,
        block_tokens, head_dim], of equal strides. Other arguments are as in `PagedBatch`."""
        ...


def store_by_torch(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """A `StoreKv` for any device."""
    indexable(keys)[blocks, :, offsets] = to_cells(k, keys.dtype)
    indexable(values)[blocks, :, offsets] = to_cells(v, values.dtype)


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's sequences and tokens, on the host, as in `PagedBatch`."""

    tables: Int32s
    lengths: Int32s
    starts: Int32s
    blocks: Int64s
    offsets: Int64s

    @classmethod
    def of(cls, sequences: list[SequenceStep], block_tokens: int, num_blocks: int) -> StepRows:
        """Raises InternalError if a block is not one of `num_blocks`."""
        counts = np.array([len(sequence.token_ids) for sequence in sequences])
        ends = np.array([sequence.start for sequence in sequences]) + counts
        tables = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), dtype=np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        check_blocks(tables, num_blocks)
        starts = np.concatenate([[0], np.cumsum(counts)])
        own = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(starts[-1]) + (ends - starts[1:])[own]
        return cls(
            tables=tables,
            lengths=ends.astype(np.int32),
            starts=starts.astype(np.int32),
            blocks=tables[own, positions // block_tokens].astype(np.int64),
            offsets=positions % block_tokens,
        )


@runtime_checkable
class PlannedKernel(Protocol):
    """A library that divides a step's work on the host before the first layer."""

    def plan(self, rows: StepRows) -> PagedKernel:
        """The kernel for this step. It may be called until the next `plan`."""
        ...


def kernel_of_step(kernel: PagedKernel | PlannedKernel, rows: StepRows) -> PagedKernel:
    return kernel.plan(rows) if isinstance(kernel, PlannedKernel) else kernel


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The positions of a step's tokens and what they attend to, on the pool's device.

    Args:
        tables: [sequences, any width] int32, the blocks of each sequence.
        lengths: [sequences] int32, tokens in the cache, including this step's.
        starts: [sequences + 1] int32, index of each first token in the flat batch; the last is the batch size.
        blocks, offsets: [tokens] int64, the cell of each token.
        most_queries, most_keys: upper bounds per sequence, for the kernel's launch.
    """

    tables: Tensor
    lengths: Tensor
    starts: Tensor
    blocks: Tensor
    offsets: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, rows: StepRows, device: torch.device) -> PagedBatch:
        return cls(
            tables=to_device(rows.tables, device),
            lengths=to_device(rows.lengths, device),
            starts=to_device(rows.starts, device),
            blocks=to_device(rows.blocks, device),
            offsets=to_device(rows.offsets, device),
            most_queries=int(np.diff(rows.starts).max()),
            most_keys=int(rows.lengths.max()),
        )


class VarlenAttention:
    """`Attend` for one step: writes the step's K and V into the pool, then attends."""

    def __init__(
        self,
        kernel: PagedKernel,
        pool: Tensor,
        batch: PagedBatch,
        terms: AttentionParams,
        store: StoreKv = store_by_torch,
    ) -> None:
        self._kernel = kernel
        self._store = store
        self._pool = pool
        self._batch = batch
        self._terms = terms

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]"""
        self._store(self._pool[:, layer, 0], self._pool[:, layer, 1], k, v, self._batch.blocks, self._batch.offsets)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]; returns [T, heads * head_dim]."""
        batch, window = self._batch, self._terms.windows[layer]
        self.store(layer, k, v)
        keys, values = self._pool[:, layer, 0], self._pool[:, layer, 1]  # [blocks, kv_heads, block_tokens, head_dim]
        attended = self._kernel(
            q,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            batch.starts,
            None,
            batch.most_queries,
            batch.most_keys,
            scale=self._terms.scale,
            window_size=(-1 if window is None else window - 1, 0),  # our window includes the token itself
            enable_gqa=True,
            seqused_k=batch.lengths,
            block_table=batch.tables,
        )
        return attended.flatten(1)
