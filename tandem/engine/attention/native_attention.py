"""Paged attention by the native kernels, which read keys and values in place.

Each token's result depends only on its own request's keys, so it is the same in any batch and any chunk.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem.engine.block_tables import check_blocks
from tandem.engine.step import SequenceStep
from tandem.kvcache.layout import KvPoolLayout, cell_width
from tandem.model.decoder import AttentionParams
from tandem.native.library import CELL_KINDS, LANES, Cells, Kernels


def supports(layout: KvPoolLayout) -> bool:
    """Whether the kernels support pools of this layout."""
    head_dim = layout.head_dim - cell_width(0, layout.dtype)
    return layout.dtype in CELL_KINDS and head_dim % LANES == 0 and layout.block_tokens % LANES == 0


class NativeStepAttention:
    """`Attend` for one step over a supported pool in host memory."""

    def __init__(
        self,
        kernels: Kernels,
        pool: Tensor,
        layout: KvPoolLayout,
        sequences: list[SequenceStep],
        terms: AttentionParams,
    ) -> None:
        self._kernels = kernels
        self._layout = layout
        self._terms = terms
        self._pool = pool  # keeps it alive: the kernels only have its address
        self._layer_bytes, self._block_bytes = layout.layer_bytes, layout.block_bytes
        counts = [len(sequence.token_ids) for sequence in sequences]
        tables = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), dtype=np.int64)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        check_blocks(tables, layout.num_blocks)
        table_of = np.arange(len(sequences)).repeat(counts)
        ranges = [np.arange(each.start, each.start + count) for each, count in zip(sequences, counts, strict=True)]
        positions = np.concatenate(ranges)
        columns, offsets = np.divmod(positions, layout.block_tokens)
        self._tables, self._table_of = torch.from_numpy(tables), torch.from_numpy(table_of)
        self._positions, self._blocks = torch.from_numpy(positions), torch.from_numpy(tables[table_of, columns])
        self._offsets = torch.from_numpy(offsets)
        at_once, end = kernels.tokens_at_once(terms.heads // layout.kv_heads), 0
        begins: list[int] = []
        for count in counts:
            begins += range(end, end + count, at_once)
            end += count
        self._items = torch.from_numpy(np.array([*begins, end]))

    def _cells(self, layer: int, head_dim: int) -> Cells:
        layout = self._layout
        return Cells(
            self._pool.data_ptr() + layer * self._layer_bytes, self._block_bytes, layout.kv_heads,
            layout.block_tokens, head_dim, layout.dtype,
        )  # fmt: skip

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]"""
        self._kernels.store_kv(self._cells(layer, k.shape[2]), k, v, self._blocks, self._offsets)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]; returns [T, heads * head_dim]."""
        terms, cells = self._terms, self._cells(layer, q.shape[2])
        self._kernels.store_kv(cells, k, v, self._blocks, self._offsets)
        return self._kernels.attend(
            cells, q, self._tables, self._table_of, self._positions, self._items,
            terms.windows[layer], terms.scale, terms.softcap,
        )  # fmt: skip
