"""Copies a piece between two pools on one GPU, and digests it, in one pass over memory.

A piece is one small copy to the device (its block ids and a zero), one launch, and one word back. A program takes a few
rows (one head of one layer of one block, K or V): each word is read once, written once, and multiplied once with its
key. `device_digest` defines the digest; sums modulo 2^64 do not depend on their order, so programs add theirs.

Only imported where Triton is installed and the pool is on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.piece_copier import Place
from kvtransfer.pool.slots import Slot, Slots

TILE_WORDS = 4096  # of 32 bits, of one program: 32 for each of its threads
MAX_WIDTH = 1024  # words of a row at a time
WARPS = 4


class TritonCopier:
    """`PieceCopier` for GPUs."""

    def __init__(self, device: torch.device, *, tile_words: int = TILE_WORDS) -> None:
        self._tile_words = tile_words
        self._slots = Slots(device)

    def launch(self, read: Place, write: Place | None, keys: DigestKeys | None) -> Slot:
        count = len(read.span.block_ids)
        slot = self._slots.take(1 + 2 * count)
        slot.view[0] = 0
        slot.view[1 : 1 + count] = read.span.block_ids
        slot.view[1 + count : 1 + 2 * count] = (write or read).span.block_ids
        used = 1 + 2 * count
        slot.device[:used].copy_(slot.host[:used], non_blocking=True)
        slot.used = self._launch(read, write or read, keys, slot.device, copies=write is not None)
        if keys is not None:
            slot.host[:1].copy_(slot.device[:1], non_blocking=True)
        return slot

    def release(self, slot: Slot) -> None:
        self._slots.give_back(slot)

    def _launch(
        self, read: Place, write: Place, keys: DigestKeys | None, ids: Tensor, *, copies: bool
    ) -> tuple[object, ...]:
        """Returns what the kernel uses."""
        span, layout = read.span, read.layout
        count, planes = len(span.block_ids), layout.sides * span.layer_count
        rows = count * planes * span.head_count
        row_words, token_words = layout.head_bytes // 4, layout.token_bytes // 4
        width = min(triton.next_power_of_2(row_words), MAX_WIDTH, self._tile_words)
        height = self._tile_words // width
        word_keys, row_keys = (ids, ids) if keys is None else (keys.words, keys.rows(2 * rows))
        _piece[(triton.cdiv(rows, height),)](
            read.words, write.words, ids[1:], ids[1 + count :], word_keys, row_keys, ids,
            rows, planes, span.head_count, count - 1, span.last_block_tokens,
            *_rows_of(read), *_rows_of(write),
            row_words=row_words, token_words=token_words, width=width, height=height,
            copies=copies, digests=keys is not None, num_warps=WARPS,
        )  # fmt: skip
        return read, write, word_keys, row_keys


def _rows_of(place: Place) -> tuple[int, int, int]:
    """In rows: a block, the span's first row in its block, and the rows between two planes (a side of a layer)."""
    span, heads, sides = place.span, place.layout.kv_heads, place.layout.sides
    return place.layout.layers * sides * heads, span.layer_start * sides * heads + span.head_start, heads


_NUMBERS = [
    "read_ids", "write_ids", "rows", "planes", "heads", "last_block", "last_tokens", "read_block", "read_first",
    "read_plane", "write_block", "write_first", "write_plane",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]
def _piece(  # type: ignore[no-untyped-def]
    source, target, read_ids, write_ids, word_keys, row_keys, digest,
    rows, planes, heads, last_block, last_tokens,
    read_block, read_first, read_plane, write_block, write_first, write_plane,
    row_words: tl.constexpr, token_words: tl.constexpr, width: tl.constexpr, height: tl.constexpr,
    copies: tl.constexpr, digests: tl.constexpr,
):  # fmt: skip
    """`height` rows per program, numbered in canonical order: block, plane, head."""
    number = tl.program_id(0) * height + tl.arange(0, height)
    there = number < rows
    head = number % heads
    plane = number // heads % planes
    block = number // heads // planes
    tokens = tl.where(block == last_block, last_tokens, row_words // token_words)
    tokens = tl.where(there, tokens, 0)
    read = tl.load(read_ids + block, mask=there, other=0) * read_block + read_first + plane * read_plane + head
    write = tl.load(write_ids + block, mask=there, other=0) * write_block + write_first + plane * write_plane + head
    sums = tl.zeros((height,), tl.int64)
    for start in tl.static_range(0, row_words, width):
        column = start + tl.arange(0, width)
        # In whole tokens, so that the compiler sees that neighbours share their mask, and moves 16 bytes at a time.
        inside = (column // token_words)[None, :] < tokens[:, None]
        words = tl.load(source + (read * row_words)[:, None] + column[None, :], mask=inside, other=0)
        if copies:
            tl.store(target + (write * row_words)[:, None] + column[None, :], words, mask=inside)
        if digests:
            keys = tl.load(word_keys + column, mask=column < row_words, other=0)
            sums += tl.sum(words.to(tl.int64) * keys[None, :], 1)
    if digests:
        low = sums.to(tl.int32).to(tl.int64)
        high = sums >> 32
        of_low = tl.load(row_keys + 2 * number, mask=there, other=0)
        of_high = tl.load(row_keys + 2 * number + 1, mask=there, other=0)
        tl.atomic_add(digest, tl.sum(low * of_low + high * of_high, 0), sem="relaxed")
