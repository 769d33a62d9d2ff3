"""A KV pool in host memory as a numpy array, and the slices that pieces consist of. No torch.

Canonical order of a piece's bytes: block, layer, K/V, head, valid tokens. Slices follow this order, each as large as
the block ids allow.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.pool.staging import Staging
from tandem.kvcache.layout import KvPoolLayout

Bytes = npt.NDArray[np.uint8]


class Copier(Protocol):
    """Copies the parts of a piece, in canonical order."""

    def copy(self, target: Bytes, source: Bytes, *, past_cache: bool) -> None:
        """Copies one part to another of the same shape. `past_cache`: the target is not read soon, so its lines need
        not be cached."""
        ...


class Reader(Protocol):
    """Reads the parts of a piece, in canonical order."""

    def feed(self, part: Bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """The place of a piece in one pool: physical blocks, layers, and the rank's own heads."""

    block_ids: tuple[int, ...]
    last_block_tokens: int
    layer_start: int
    layer_count: int
    head_start: int
    head_count: int


class PoolMap:
    """`blocks`: u8 [block, layer, side, head, block_tokens, token_bytes] over `buffer`."""

    def __init__(self, layout: KvPoolLayout, buffer: mmap.mmap | bytearray | Bytes) -> None:
        self.layout = layout
        self.blocks: Bytes = np.frombuffer(buffer, np.uint8, count=layout.pool_bytes).reshape(
            layout.num_blocks, layout.layers, layout.sides, layout.kv_heads, layout.block_tokens, layout.token_bytes
        )

    @classmethod
    def map_fd(cls, layout: KvPoolLayout, fd: int, *, writable: bool) -> PoolMap:
        """Maps a pool's memfd; the fd may be closed afterwards.

        Raises:
            HandoffFault: (protocol) the file is not a pool of this layout, or its size is not sealed.
        """
        size = os.fstat(fd).st_size
        if size != layout.pool_bytes:
            raise protocol_fault(f"pool: expected a file of {layout.pool_bytes} bytes, got {size}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise protocol_fault(f"pool: expected a memfd: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise protocol_fault("pool: expected its size to be sealed (F_SEAL_SHRINK)")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            return cls(layout, mmap.mmap(fd, size, mmap.MAP_SHARED, access))
        except (OSError, ValueError) as error:
            raise HandoffFault(HandoffCause.TRANSPORT, f"pool: cannot map it: {error}") from error

    def check(self, span: PoolSpan) -> None:
        """Raises HandoffFault (protocol) unless all of `span` is in this pool."""
        check_span(self.layout, span)

    @contextmanager
    def on_host(
        self, span: PoolSpan, staging: Staging[Bytes], *, write: bool, scratch_bytes: int = 0
    ) -> Iterator[tuple[PoolMap, PoolSpan, Bytes]]:
        """The span in host memory, and scratch; see DevicePool."""
        if not scratch_bytes:
            yield self, span, np.empty(0, np.uint8)
            return
        with staging.lease(scratch_bytes, receives=write) as scratch:
            yield self, span, scratch

    def cursor(self, span: PoolSpan) -> Cursor:
        return Cursor(self.slices(span))

    def slices(self, span: PoolSpan) -> Iterator[Bytes]:
        """The span's bytes in canonical order: one slice for each run of neighbouring blocks."""
        full = full_blocks(self.layout, span)
        for start, end in runs(span.block_ids[:full]):
            yield self._run(span, start, end)
        if full < len(span.block_ids):
            yield self._tail(span)

    def pack(self, span: PoolSpan, payload_bytes: int) -> Bytes:
        """A copy of the span's bytes, contiguous and in canonical order."""
        out = np.empty(payload_bytes, np.uint8)
        self.cursor(span).read(out)
        return out

    def unpack(self, data: Bytes, span: PoolSpan) -> None:
        """Writes bytes from `pack` into the span."""
        self.cursor(span).write(data)

    def copy_from(self, source: PoolMap, read: PoolSpan, write: PoolSpan, copier: Copier | None = None) -> None:
        """Copies a piece from another pool; `read` and `write` have the same shape."""
        full = full_blocks(self.layout, write)
        for start, end in runs(write.block_ids[:full], read.block_ids[:full]):
            _copy(self._run(write, start, end), source._run(read, start, end), copier, past_cache=True)
        if full < len(write.block_ids):
            _copy(self._tail(write), source._tail(read), copier, past_cache=True)

    def _run(self, span: PoolSpan, start: int, end: int) -> Bytes:
        first = span.block_ids[start]
        return self.blocks[
            first : first + end - start,
            span.layer_start : span.layer_start + span.layer_count,
            :,
            span.head_start : span.head_start + span.head_count,
        ]

    def _tail(self, span: PoolSpan) -> Bytes:
        return self.blocks[
            span.block_ids[-1],
            span.layer_start : span.layer_start + span.layer_count,
            :,
            span.head_start : span.head_start + span.head_count,
            : span.last_block_tokens,
        ]


def make_staging(size: int) -> Bytes:
    """A page-aligned buffer. On some processors, copies to addresses slightly above a page boundary, where the
    allocator puts large arrays, take several times as long (glibc bug 30994)."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class Cursor:
    """Iterates over a span's bytes in canonical order, any number at a time."""

    def __init__(self, parts: Iterable[Bytes]) -> None:
        self._rest = list(parts)[::-1]  # reversed: the next part is last

    def read(self, out: Bytes, copier: Copier | None = None) -> None:
        """Reads the next `out.size` bytes."""
        offset = 0
        for part in self._take(out.size):
            _copy(out[offset : offset + part.size].reshape(part.shape), part, copier, past_cache=False)
            offset += part.size

    def contiguous(self, size: int, reader: Reader | None = None) -> Bytes | None:
        """A view of the next `size` bytes, which `reader` reads too; None if they are not contiguous here."""
        part = self._rest[-1]
        if part.nbytes < size or not part.flags.c_contiguous:
            return None
        (view,) = self._take(size)
        if reader is not None:
            reader.feed(view)
        return view.reshape(-1)

    def write(self, data: Bytes, copier: Copier | None = None) -> None:
        """Writes the next `data.size` bytes."""
        offset = 0
        for part in self._take(data.size):
            _copy(part, data[offset : offset + part.size].reshape(part.shape), copier, past_cache=False)
            offset += part.size

    def _take(self, size: int) -> Iterator[Bytes]:
        """Views of the next `size` bytes, of which enough must be left."""
        while size:
            part = self._rest.pop()
            if part.nbytes <= size:
                size -= part.nbytes
                yield part
            elif part.flags.c_contiguous:
                flat = part.reshape(-1)
                self._rest.append(flat[size:])
                yield flat[:size]
                size = 0
            else:
                count = max(1, size // part[0].nbytes)
                first = part[:count] if count > 1 else part[0]
                self._rest += [part[count:], first] if count < len(part) else [first]


def _copy(target: Bytes, source: Bytes, copier: Copier | None, *, past_cache: bool) -> None:
    if copier is None:
        np.copyto(target, source)
    else:
        copier.copy(target, source, past_cache=past_cache)


def check_span(layout: KvPoolLayout, span: PoolSpan) -> None:
    """Raises HandoffFault (protocol) unless all of `span` is in such a pool. Checks all ids from peers."""
    inside = (
        bool(span.block_ids)
        and min(span.block_ids) >= 0
        and max(span.block_ids) < layout.num_blocks
        and 0 <= span.layer_start < span.layer_start + span.layer_count <= layout.layers
        and 0 <= span.head_start < span.head_start + span.head_count <= layout.kv_heads
        and 0 < span.last_block_tokens <= layout.block_tokens
    )
    if not inside:
        raise protocol_fault("piece: expected physical blocks, layers, heads and tokens within the pool")


def payload_bytes(layout: KvPoolLayout, blocks: int, last_block_tokens: int, layers: int, heads: int) -> int:
    """Bytes of a piece whose blocks are full except perhaps the last."""
    tokens = (blocks - 1) * layout.block_tokens + last_block_tokens
    return tokens * layers * heads * layout.sides * layout.token_bytes


def full_blocks(layout: KvPoolLayout, span: PoolSpan) -> int:
    """Number of full blocks: all of the span's, or all but the last."""
    return len(span.block_ids) - (span.last_block_tokens < layout.block_tokens)


def runs(*columns: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges [start, end) of positions in which the ids of every column are consecutive."""
    length = len(columns[0])
    if not length:
        return
    broken = np.zeros(length - 1, np.bool_)
    for column in columns:
        broken |= np.diff(np.asarray(column, np.int64)) != 1
    start = 0
    for end in (*(np.flatnonzero(broken) + 1).tolist(), length):
        yield start, end
        start = end
