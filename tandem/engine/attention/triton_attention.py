"""A paged attention kernel in Triton, for any KV block size, which splits long sequences.

One program processes a tile of queries of one sequence and one KV head, whose query heads are further rows, and
iterates over the keys with an online softmax (Dao 2023, arXiv:2307.08691). If there are fewer tiles than the GPU can
run, or a sequence is much longer than the others, several programs share a tile's keys, and a second kernel combines
their results. Each program computes from the lengths on the device which keys of which tile are its own, so the same
launch suits every step of a recording.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.fp8 import FP8, LARGEST_FP8

_LEAST_ROWS = 16  # of a matrix product
_WIDE = 128  # wider heads use half-size tiles, to fit in shared memory
_JOINED = 8192  # numbers of parts that are combined at a time
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a program: `rows` of queries, at least; a `tile` of keys at a time, of which `stages` are loaded ahead.
    `spread`: programs per processor of the GPU, where there are fewer tiles of queries."""

    rows: int
    tile: int
    warps: int = 4
    stages: int = 2
    spread: float = 2.0


def tiling_of(*, one_query: bool, head_dim: int) -> Tiling:
    """The fastest of those that `benchmarks.device_kernels` tried on an H200."""
    tile = 64 if head_dim <= _WIDE else 32
    return Tiling(_LEAST_ROWS if one_query else tile, tile)


class TritonAttention:
    """A `PagedKernel` for keys and values of equal strides, including fp8. Its calls follow each other on one stream,
    because they share the memory for parts. Args: `processors` of the GPU, to keep busy; `tiling` None: `tiling_of`."""

    def __init__(self, processors: int, tiling: Tiling | None = None) -> None:
        self._processors = processors
        self._tiling = tiling
        self._memory: dict[tuple[int, ...], Tensor] = {}

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
        tiling = self._tiling or tiling_of(one_query=one_query, head_dim=head_dim)
        tile, rows = tiling.tile, max(tiling.rows, group)
        tiles = sequences if one_query else tokens // (rows // group) + sequences
        shares = max(2, int(tiling.spread * self._processors) // kv_heads) if max_k > tile else 0
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        parts, edges = self._parts(2 * shares, kv_heads, rows, head_dim, query.device) if shares else (out, out)
        sizes = {
            "left": window_size[0], "group": group, "rows": rows, "tile": tile, "shares": shares,
            "sequences_padded": triton.next_power_of_2(sequences), "all_heads": heads, "heads": heads // kv_heads,
            "dims": head_dim, "dims_padded": triton.next_power_of_2(head_dim), "one_query": one_query,
            "num_warps": tiling.warps,
        }  # fmt: skip
        joined = group if one_query else rows
        together = max(1, min(16, _JOINED // (joined * sizes["dims_padded"])))
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            _attend[(tiles + shares, kv_heads)](
                query, key, value, out, parts, edges, cu_seq_q, seqused_k, block_table,
                sequences, (scale or head_dim**-0.5) * _LOG2_E, query.stride(0), query.stride(1),
                key.stride(0), key.stride(1), key.stride(2), block_table.stride(0),
                page=page, num_stages=tiling.stages, **sizes,
            )  # fmt: skip
            if shares:
                _join[(tiles, kv_heads)](
                    out, parts, edges, cu_seq_q, seqused_k, sequences, joined=joined, together=together, **sizes
                )
        return out

    @staticmethod
    def store(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """As `StoreKv`, in one launch."""
        tokens, heads, dims = k.shape
        with torch.cuda.device_of(k):  # type: ignore[no-untyped-call]
            _store[(tokens,)](
                keys, values, k, v, blocks, offsets, keys.stride(0), keys.stride(1), keys.stride(2),
                k.stride(0), k.stride(1), v.stride(0), v.stride(1), fp8=keys.dtype == FP8, largest=LARGEST_FP8,
                heads=heads, heads_padded=triton.next_power_of_2(heads),
                dims=dims, dims_padded=triton.next_power_of_2(dims),
            )  # fmt: skip

    def _parts(self, most: int, kv_heads: int, rows: int, dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """fp32 [most, kv_heads, rows, dims] for the results of tiles with several programs, and [2, ...] for their
        largest scores and sums. Allocated once for all layers and recordings."""
        size = (most, kv_heads, rows, dims)
        if size not in self._memory:
            self._memory[size] = torch.empty(most * kv_heads * rows * (dims + 2), dtype=torch.float32, device=device)
        edge = most * kv_heads * rows * dims
        return self._memory[size][:edge], self._memory[size][edge:]


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    keys, values, k, v, blocks, offsets, page_stride, kv_head_stride, cell_stride,
    k_stride, k_head_stride, v_stride, v_head_stride, fp8: tl.constexpr, largest: tl.constexpr,
    heads: tl.constexpr, heads_padded: tl.constexpr, dims: tl.constexpr, dims_padded: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, heads_padded)[:, None], tl.arange(0, dims_padded)[None, :]
    there = (head < heads) & (dim < dims)
    to = tl.load(blocks + token) * page_stride + tl.load(offsets + token) * cell_stride + head * kv_head_stride + dim
    key = tl.load(k + token * k_stride + head * k_head_stride + dim, mask=there, other=0.0)
    value = tl.load(v + token * v_stride + head * v_head_stride + dim, mask=there, other=0.0)
    if fp8:
        key, value = _clamped(key.to(tl.float32), largest), _clamped(value.to(tl.float32), largest)
    tl.store(keys + to, key.to(keys.dtype.element_ty), mask=there)
    tl.store(values + to, value.to(values.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _clamped(x, largest: tl.constexpr):  # type: ignore[no-untyped-def]
    """NaN and infinity become NaN."""
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -largest), largest), float("nan"))


@triton.jit  # type: ignore[untyped-decorator]
def _work(  # type: ignore[no-untyped-def]
    starts, lengths, sequences,
    sequences_padded: tl.constexpr, left: tl.constexpr, per_tile: tl.constexpr, tile: tl.constexpr,
    shares: tl.constexpr,
):  # fmt: skip
    """For each sequence: its tiles of queries, the programs per tile, and those before it in the grid; and the parts
    that tiles with several programs have before it.

    A program has at most a 1 / `shares` part of all work, so `shares` programs more than tiles are enough, and tiles
    with several programs have at most 2 · `shares` of them.
    """
    number = tl.arange(0, sequences_padded)
    there = number < sequences
    begin = tl.load(starts + number, mask=there, other=0)
    queries = tl.load(starts + number + 1, mask=there, other=0) - begin
    keys = tl.load(lengths + number, mask=there, other=0)
    tiles = tl.where(there, tl.cdiv(queries, per_tile), 0)
    if left >= 0:
        keys = tl.minimum(keys, left + per_tile + tile)  # what any tile sees, from the beginning of a tile of keys
    steps = tl.cdiv(keys, tile)
    splits = tl.full([sequences_padded], 1, tl.int32)
    if shares > 0:
        share = tl.maximum(tl.cdiv(tl.sum(tiles.to(tl.int64) * steps, 0), shares), 1).to(tl.int32)
        splits = tl.maximum(tl.cdiv(steps, share), 1)
    programs = tiles * splits
    parts = tl.where(splits > 1, programs, 0)
    return tiles, splits, tl.cumsum(programs, 0) - programs, tl.cumsum(parts, 0) - parts


@triton.jit
def _of(values, number, chosen):  # type: ignore[no-untyped-def]
    """The value at `chosen`."""
    return tl.sum(tl.where(number == chosen, values, 0), 0)


@triton.jit
def _with_tile(scores, v, best, total, summed):  # type: ignore[no-untyped-def]
    """The largest scores, sums of weights and weighted values of rows, with those of a tile of keys."""
    better = tl.maximum(best, tl.max(scores, 1))
    held = tl.where(better == float("-inf"), 0.0, better)  # a row without visible keys so far
    weights = tl.exp2(scores - held[:, None])
    kept = tl.exp2(best - held)
    total = total * kept + tl.sum(weights, 1)
    return better, total, summed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")


# Excluded are numbers that change with every step: Triton would compile variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["sequences", "table_stride"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, out, parts, edges, starts, lengths, tables,
    sequences, scale, query_stride, head_stride,
    page_stride, cell_stride, kv_head_stride, table_stride,
    left: tl.constexpr, heads: tl.constexpr, group: tl.constexpr, all_heads: tl.constexpr, dims: tl.constexpr,
    dims_padded: tl.constexpr, page: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, shares: tl.constexpr,
    sequences_padded: tl.constexpr, one_query: tl.constexpr,
):  # fmt: skip
    """`heads` are the query heads of a KV head, `group` is the next power of two. `scale` includes log2(e)."""
    kv_head = tl.program_id(1)
    per_tile: tl.constexpr = 1 if one_query else rows // group
    tiles, all_splits, before, parts_before = _work(
        starts, lengths, sequences, sequences_padded, left, per_tile, tile, shares
    )
    number = tl.arange(0, sequences_padded)
    sequence = tl.sum(((number < sequences) & (before <= tl.program_id(0))).to(tl.int32), 0) - 1
    splits = _of(all_splits, number, sequence)
    own = tl.program_id(0) - _of(before, number, sequence)
    local, split = own // splits, own % splits
    if local >= _of(tiles, number, sequence):
        return
    begin = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - begin
    first = local * per_tile
    length = tl.load(lengths + sequence)
    row, dim = tl.arange(0, rows), tl.arange(0, dims_padded)
    place, head = first + row // group, row % group
    known = (row // group < per_tile) & (place < queries) & (head < heads)
    position = length - queries + place
    token = (begin + place).to(tl.int64)
    own_head = kv_head * heads + head
    q_at = query + token * query_stride + own_head * head_stride
    q = tl.load(q_at[:, None] + dim[None, :], mask=known[:, None] & (dim < dims)[None, :], other=0.0)

    # Keys visible to any query of the tile, and this split's part of them.
    lowest = 0
    if left >= 0:
        lowest = tl.maximum(length - queries + first - left, 0)
    start = lowest // tile * tile
    end = tl.minimum(length - queries + first + per_tile, length)
    share = tl.cdiv(tl.cdiv(end - start, tile), splits) * tile
    start += split * share
    end = tl.minimum(end, start + share)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    summed = tl.zeros([rows, dims_padded], tl.float32)
    table = tables + sequence * table_stride
    at_head = kv_head * kv_head_stride
    # Every query sees the tiles before `mixed`, so they need no mask. With a window, few are such.
    mixed = start
    if left < 0:
        all_see = tl.minimum(length - queries + first + 1, end)
        mixed += tl.maximum(all_see - start, 0) // tile * tile
        for at in range(start, mixed, tile):
            key = at + tl.arange(0, tile)
            cell = tl.load(table + key // page).to(tl.int64) * page_stride + (key % page) * cell_stride + at_head
            if dims == dims_padded:
                k = tl.load(keys + cell[:, None] + dim[None, :]).to(q.dtype)
                v = tl.load(values + cell[:, None] + dim[None, :]).to(q.dtype)
            else:
                k = tl.load(keys + cell[:, None] + dim[None, :], mask=(dim < dims)[None, :], other=0.0).to(q.dtype)
                v = tl.load(values + cell[:, None] + dim[None, :], mask=(dim < dims)[None, :], other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            best, total, summed = _with_tile(scores, v, best, total, summed)
    for at in range(mixed, end, tile):
        key = at + tl.arange(0, tile)
        there = (key < end) & (key >= lowest)
        block = tl.load(table + key // page, mask=there, other=0).to(tl.int64)
        cell = block * page_stride + (key % page) * cell_stride + at_head
        whole = there[:, None] & (dim < dims)[None, :]
        k = tl.load(keys + cell[:, None] + dim[None, :], mask=whole, other=0.0).to(q.dtype)
        v = tl.load(values + cell[:, None] + dim[None, :], mask=whole, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        back = position[:, None] - key[None, :]
        seen = there[None, :] & (back >= 0)
        if left >= 0:
            seen = seen & (back <= left)
        scores = tl.where(seen, scores, float("-inf"))
        best, total, summed = _with_tile(scores, v, best, total, summed)

    inside = known[:, None] & (dim < dims)[None, :]
    if splits == 1:
        o_at = out + (token * all_heads + own_head)[:, None] * dims + dim[None, :]
        tl.store(o_at, (summed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        part = ((_of(parts_before, number, sequence) + own) * tl.num_programs(1) + kv_head) * rows + row
        tl.store(parts + part[:, None].to(tl.int64) * dims + dim[None, :], summed, mask=inside)
        tl.store(edges + 2 * part, best, mask=known)
        tl.store(edges + 2 * part + 1, total, mask=known)


@triton.jit(do_not_specialize=["sequences"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    out, parts, edges, starts, lengths, sequences,
    left: tl.constexpr, heads: tl.constexpr, group: tl.constexpr, all_heads: tl.constexpr, dims: tl.constexpr,
    dims_padded: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, shares: tl.constexpr,
    sequences_padded: tl.constexpr, one_query: tl.constexpr, joined: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """Combines the parts of each tile that several programs computed, `together` at a time, in their first `joined`
    rows. parts [part, kv_head, rows, dims], not divided yet; edges [part, kv_head, rows, 2]: largest scores, sums."""
    kv_head = tl.program_id(1)
    per_tile: tl.constexpr = 1 if one_query else rows // group
    tiles, all_splits, _, parts_before = _work(
        starts, lengths, sequences, sequences_padded, left, per_tile, tile, shares
    )
    number = tl.arange(0, sequences_padded)
    tiles_before = tl.cumsum(tiles, 0) - tiles
    sequence = tl.sum(((number < sequences) & (tiles_before <= tl.program_id(0))).to(tl.int32), 0) - 1
    splits = _of(all_splits, number, sequence)
    local = tl.program_id(0) - _of(tiles_before, number, sequence)
    if (local >= _of(tiles, number, sequence)) | (splits == 1):
        return
    begin = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - begin
    row, dim = tl.arange(0, joined), tl.arange(0, dims_padded)
    place, head = local * per_tile + row // group, row % group
    known = (row // group < per_tile) & (place < queries) & (head < heads)
    inside = known[:, None] & (dim < dims)[None, :]
    first = _of(parts_before, number, sequence) + local * splits

    best = tl.full([joined], float("-inf"), tl.float32)
    total = tl.zeros([joined], tl.float32)
    summed = tl.zeros([joined, dims_padded], tl.float32)
    for split in range(0, splits, together):
        some = split + tl.arange(0, together)
        there = (some < splits)[:, None] & known[None, :]
        part = ((first + some)[:, None] * tl.num_programs(1) + kv_head) * rows + row[None, :]
        own = tl.load(edges + 2 * part, mask=there, other=float("-inf"))
        sums = tl.load(edges + 2 * part + 1, mask=there, other=0.0)
        whole = there[:, :, None] & (dim < dims)[None, None, :]
        values = tl.load(parts + part[:, :, None].to(tl.int64) * dims + dim[None, None, :], mask=whole, other=0.0)
        better = tl.maximum(best, tl.max(own, 0))
        held = tl.where(better == float("-inf"), 0.0, better)
        kept, added = tl.exp2(best - held), tl.exp2(own - held[None, :])  # 0 for a part without visible keys
        total = total * kept + tl.sum(sums * added, 0)
        summed = summed * kept[:, None] + tl.sum(values * added[:, :, None], 0)
        best = better
    o_at = out + ((begin + place).to(tl.int64) * all_heads + kv_head * heads + head)[:, None] * dims + dim[None, :]
    tl.store(o_at, (summed / total[:, None]).to(out.dtype.element_ty), mask=inside)
