"""A paged attention kernel in Triton, for any KV block size, which splits long sequences.

One program processes a tile of queries of one sequence and one KV head, whose query heads are further rows, and
iterates over the keys with an online softmax (Dao 2023, arXiv:2307.08691). With one query per sequence there would be
too few programs. Then several share a sequence's keys, and a second kernel combines their results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST_ROWS = 16  # of a matrix product
_WIDE = 128  # wider heads use half-size tiles, to fit in shared memory
_MOST_SPLITS = 32
_LOG2_E = 1.4426950408889634


class TritonAttention:
    """A `PagedKernel` for keys and values of equal strides, including fp8. Args: `processors` of the GPU, to keep
    busy."""

    def __init__(self, processors: int) -> None:
        self._processors = processors

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
        tokens, heads, head_dim = query.shape
        page, kv_heads, sequences = key.shape[1], key.shape[2], len(seqused_k)
        group = triton.next_power_of_2(heads // kv_heads)
        one_query = max_q == 1
        tile = 64 if head_dim <= _WIDE else 32
        rows = max(_LEAST_ROWS if one_query else 2 * tile, group)
        tiles = sequences if one_query else tokens // (rows // group) + sequences
        splits = self._splits(tiles * kv_heads, max_k // tile) if one_query else 1
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        parts, edges = out, out
        if splits > 1:
            parts = torch.empty(tokens, heads, splits, head_dim, dtype=torch.float32, device=query.device)
            edges = torch.empty(2, tokens, heads, splits, dtype=torch.float32, device=query.device)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            _attend[(tiles, kv_heads, splits)](
                query, key, value, out, parts, edges, cu_seq_q, seqused_k, block_table,
                sequences, tokens, (scale or head_dim**-0.5) * _LOG2_E, query.stride(0), query.stride(1),
                key.stride(0), key.stride(1), key.stride(2), block_table.stride(0),
                left=window_size[0], heads=heads // kv_heads, group=group, all_heads=heads, dims=head_dim,
                dims_padded=triton.next_power_of_2(head_dim), page=page, rows=rows, tile=tile, splits=splits,
                one_query=one_query, num_warps=4 if one_query else 8, num_stages=2,
            )  # fmt: skip
            if splits > 1:
                _join[(tokens, heads)](
                    out, parts, edges, tokens, all_heads=heads, dims=head_dim,
                    dims_padded=triton.next_power_of_2(head_dim), splits=splits,
                )  # fmt: skip
        return out

    def _splits(self, programs: int, most_tiles: int) -> int:
        """Enough splits for two programs per processor, but not more than the longest sequence has tiles."""
        wanted = min(2 * self._processors // programs, most_tiles, _MOST_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)


# Excluded are numbers that change with every step: Triton would compile variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["sequences", "tokens", "table_stride"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, out, parts, edges, starts, lengths, tables,
    sequences, tokens, scale, query_stride, head_stride,
    page_stride, cell_stride, kv_head_stride, table_stride,
    left: tl.constexpr, heads: tl.constexpr, group: tl.constexpr, all_heads: tl.constexpr, dims: tl.constexpr,
    dims_padded: tl.constexpr, page: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, splits: tl.constexpr,
    one_query: tl.constexpr,
):  # fmt: skip
    """`heads` are the query heads of a KV head, `group` is the next power of two. `scale` includes log2(e)."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    per_tile: tl.constexpr = rows // group
    sequence, local = tl.program_id(0), 0
    if not one_query:  # tiles of sequence s begin at starts[s] // per_tile + s, so that each has enough
        low, high = 0, sequences
        while low < high:
            middle = (low + high) // 2
            if tl.load(starts + middle) // per_tile + middle <= tl.program_id(0):
                low = middle + 1
            else:
                high = middle
        sequence = low - 1
        local = tl.program_id(0) - (tl.load(starts + sequence) // per_tile + sequence)
    begin = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - begin
    first = local * per_tile
    if first >= queries:
        return
    length = tl.load(lengths + sequence)
    row, dim = tl.arange(0, rows), tl.arange(0, dims_padded)
    number, head = first + row // group, row % group
    known = (number < queries) & (head < heads)
    position = length - queries + number
    token = (begin + number).to(tl.int64)
    own_head = kv_head * heads + head
    q_at = query + token * query_stride + own_head * head_stride
    q = tl.load(q_at[:, None] + dim[None, :], mask=known[:, None] & (dim < dims)[None, :], other=0.0)

    # Keys visible to any query of the tile, and this split's part of them.
    lowest = 0
    if left >= 0:
        lowest = tl.maximum(length - queries + first - left, 0)
    start = lowest // tile * tile
    end = tl.minimum(length - queries + first + per_tile, length)
    if splits > 1:
        share = tl.cdiv(tl.cdiv(end - start, tile), splits) * tile
        start += split * share
        end = tl.minimum(end, start + share)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    summed = tl.zeros([rows, dims_padded], tl.float32)
    for at in range(start, end, tile):
        key = at + tl.arange(0, tile)
        there = (key < end) & (key >= lowest)
        block = tl.load(tables + sequence * table_stride + key // page, mask=there, other=0).to(tl.int64)
        cell = block * page_stride + (key % page) * cell_stride + kv_head * kv_head_stride
        whole = there[:, None] & (dim < dims)[None, :]
        k = tl.load(keys + cell[:, None] + dim[None, :], mask=whole, other=0.0).to(q.dtype)
        v = tl.load(values + cell[:, None] + dim[None, :], mask=whole, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        back = position[:, None] - key[None, :]
        seen = there[None, :] & (back >= 0)
        if left >= 0:
            seen = seen & (back <= left)
        scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        held = tl.where(better == float("-inf"), 0.0, better)  # a row without visible keys so far
        weights = tl.exp2(scores - held[:, None])
        kept = tl.exp2(best - held)
        total = total * kept + tl.sum(weights, 1)
        summed = summed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = better

    place = token * all_heads + own_head
    if splits == 1:
        o_at = out + place[:, None] * dims + dim[None, :]
        answer = (summed / total[:, None]).to(out.dtype.element_ty)
        tl.store(o_at, answer, mask=known[:, None] & (dim < dims)[None, :])
    else:
        part = place * splits + split
        tl.store(parts + part[:, None] * dims + dim[None, :], summed, mask=known[:, None] & (dim < dims)[None, :])
        tl.store(edges + part, best, mask=known)
        tl.store(edges + tokens.to(tl.int64) * all_heads * splits + part, total, mask=known)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    out, parts, edges, tokens,
    all_heads: tl.constexpr, dims: tl.constexpr, dims_padded: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """parts [tokens, heads, splits, dims], not divided yet; edges [2, tokens, heads, splits]: largest scores, sums."""
    place = tl.program_id(0).to(tl.int64) * all_heads + tl.program_id(1)
    split, dim = tl.arange(0, splits), tl.arange(0, dims_padded)
    part = place * splits + split
    best = tl.load(edges + part)
    total = tl.load(edges + tokens.to(tl.int64) * all_heads * splits + part)
    weights = tl.exp2(best - tl.max(best, 0))  # 0 for a split without keys
    summed = tl.load(parts + part[:, None] * dims + dim[None, :], mask=(dim < dims)[None, :], other=0.0)
    answer = tl.sum(summed * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(out + place * dims + dim, answer.to(out.dtype.element_ty), mask=dim < dims)
