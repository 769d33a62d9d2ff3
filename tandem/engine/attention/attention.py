"""Paged attention for one step on the pool, with torch.

The pool is viewed as rows: one row per (block, layer, K or V, head) of `block_tokens` × `head_dim` values. Row numbers
are computed once per step for layer 0; a layer adds its offset. Queries that share a KV head become further query rows,
so grouped-query attention copies no K and V. Layers with a window read only the blocks inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.block_tables import check_blocks
from tandem.engine.cells import from_cells, indexable, to_cells
from tandem.engine.step import SequenceStep
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import AttentionParams
from tandem.model.fp8 import FP8


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests attended to in one call: all single queries together, or one prompt chunk.

    rows_k, rows_v: [requests * kv_heads * blocks] of layer 0. tokens: [requests, queries] indices in the flat batch.
    mask: [requests, 1, group * queries, blocks * block_tokens], added to scores: 0 where a query may attend, else -inf.
    beyond: [requests, 1, blocks * block_tokens, 1], cells after a request's last token, which may hold values that are
    not finite: no mask hides those.
    """

    tokens: Tensor
    rows_k: Tensor
    rows_v: Tensor
    mask: Tensor
    beyond: Tensor
    blocks: int


class StepAttention:
    """`Attend` for one step: writes the step's K and V to the pool, then attends."""

    def __init__(
        self, pool: Tensor, layout: KvPoolLayout, sequences: list[SequenceStep], terms: AttentionParams
    ) -> None:
        self._layout = layout
        self._terms = terms
        self._device, self._dtype = pool.device, pool.dtype
        self._per_kv = terms.heads // layout.kv_heads
        self._rows = indexable(pool).view(-1, layout.block_tokens, layout.head_dim)
        self._cells = indexable(pool).view(-1, layout.head_dim)
        self._layer_rows = 2 * layout.kv_heads
        self._write_k, self._write_v = self._write_cells(sequences)
        self._groups = {window: self._group(sequences, window) for window in set(terms.windows)}

    def _row(self, blocks: Tensor, kv: int) -> Tensor:
        """Row of head 0 of K (0) or V (1) of layer 0 in each block."""
        return blocks * (self._layout.layers * self._layer_rows) + kv * self._layout.kv_heads

    def _write_cells(self, sequences: list[SequenceStep]) -> tuple[Tensor, Tensor]:
        """Cell (row, token) of every new token and head, for K and for V: [tokens * kv_heads], layer 0."""
        size = self._layout.block_tokens
        blocks = [s.blocks[p // size] for s in sequences for p in range(s.start, s.start + len(s.token_ids))]
        offsets = [p % size for s in sequences for p in range(s.start, s.start + len(s.token_ids))]
        block = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1)
        offset = torch.tensor(offsets, dtype=torch.int64).unsqueeze(1)
        heads = torch.arange(self._layout.kv_heads, dtype=torch.int64)
        cells_k, cells_v = (((self._row(block, kv) + heads) * size + offset).flatten() for kv in (0, 1))
        return cells_k.to(self._device), cells_v.to(self._device)

    def _group(self, sequences: list[SequenceStep], window: int | None) -> list[_Group]:
        groups: list[_Group] = []
        singles: list[tuple[int, SequenceStep]] = []
        place = 0
        for sequence in sequences:
            if len(sequence.token_ids) == 1:
                singles.append((place, sequence))
            else:
                tokens = torch.arange(place, place + len(sequence.token_ids))[None]
                groups.append(self._make(tokens, [sequence], window))
            place += len(sequence.token_ids)
        if singles:
            tokens = torch.tensor([[place] for place, _ in singles], dtype=torch.int64)
            groups.append(self._make(tokens, [sequence for _, sequence in singles], window))
        return groups

    def _make(self, tokens: Tensor, sequences: list[SequenceStep], window: int | None) -> _Group:
        size = self._layout.block_tokens
        first = [0 if window is None else max(0, s.start + 1 - window) // size for s in sequences]
        needed = [(s.start + len(s.token_ids) - 1) // size + 1 for s in sequences]
        width = max(end - start for start, end in zip(first, needed, strict=True))
        table = torch.zeros(len(sequences), width, dtype=torch.int64)
        for index, (sequence, start, end) in enumerate(zip(sequences, first, needed, strict=True)):
            table[index, : end - start] = torch.tensor(sequence.blocks[start:end], dtype=torch.int64)
        check_blocks(table.numpy(), self._layout.num_blocks)
        heads = torch.arange(self._layout.kv_heads, dtype=torch.int64)
        rows_k, rows_v = (
            (self._row(table, kv)[:, None, :] + heads[None, :, None]).flatten().to(self._device) for kv in (0, 1)
        )
        queries = torch.tensor([[s.start] for s in sequences]) + torch.arange(tokens.shape[1])
        keys = torch.tensor([[start * size] for start in first]) + torch.arange(width * size)
        back = queries[:, :, None] - keys[:, None, :]  # distance from each query back to each key
        hidden = back < 0 if window is None else (back < 0) | (back >= window)
        dtype = torch.float32 if self._dtype == FP8 else self._dtype
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        # All queries of a group share the mask. A single query needs no copy of its row.
        mask = mask.expand(-1, self._per_kv, -1) if tokens.shape[1] == 1 else mask.repeat(1, self._per_kv, 1)
        ends = torch.tensor([[s.start + len(s.token_ids)] for s in sequences])
        beyond = (keys >= ends)[:, None, :, None].to(self._device)
        return _Group(tokens.to(self._device), rows_k, rows_v, mask[:, None].to(self._device), beyond, width)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]"""
        width, offset = self._layout.head_dim, layer * self._layer_rows * self._layout.block_tokens
        self._cells.index_copy_(0, self._write_k + offset, to_cells(k, self._dtype).reshape(-1, width))
        self._cells.index_copy_(0, self._write_v + offset, to_cells(v, self._dtype).reshape(-1, width))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]; returns [T, heads * head_dim]."""
        self.store(layer, k, v)
        row_offset = layer * self._layer_rows
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups[self._terms.windows[layer]]:
            out[group.tokens.flatten()] = self._attend(group, row_offset, q)
        return out.flatten(1)

    def _attend(self, group: _Group, row_offset: int, q: Tensor) -> Tensor:
        """[requests * queries, heads, head_dim]"""
        layout = self._layout
        requests, queries = group.tokens.shape
        per_kv = self._per_kv
        shape = (requests, layout.kv_heads, group.blocks * layout.block_tokens, layout.head_dim)
        keys, values = (
            from_cells(self._rows.index_select(0, rows + row_offset), self._dtype, q.dtype)
            .view(shape)
            .masked_fill_(group.beyond, 0)
            for rows in (group.rows_k, group.rows_v)
        )
        # [requests, queries, kv_heads, per_kv, dim] → [requests, kv_heads, per_kv * queries, dim]
        grouped = q[group.tokens.flatten()].view(requests, queries, layout.kv_heads, per_kv, layout.head_dim)
        rows = grouped.permute(0, 2, 3, 1, 4).reshape(requests, layout.kv_heads, per_kv * queries, layout.head_dim)
        attended = self._scored(rows, keys, values, group.mask.to(q.dtype))
        back = attended.view(requests, layout.kv_heads, per_kv, queries, layout.head_dim).permute(0, 3, 1, 2, 4)
        return back.reshape(requests * queries, layout.kv_heads * per_kv, layout.head_dim)

    def _scored(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Softmax attention; explicit if scores are capped, which torch's kernels do not support."""
        terms = self._terms
        if terms.softcap is None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=terms.scale)
        scores = (queries @ keys.transpose(-1, -2)).mul_(terms.scale / terms.softcap).tanh_().mul_(terms.softcap)
        return scores.add_(mask).softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values
