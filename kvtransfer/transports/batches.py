"""A span's bytes as lists of buffers for scatter-gather I/O.

Long contiguous runs are used in place in the pool. Short ones go through a scratch buffer, which costs less than one
kernel buffer each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtransfer.pool.pool import Bytes, PoolMap, PoolSpan

BATCH_BYTES = 2 << 20  # hashed while in the CPU's last-level cache; smaller batches cost more wake-ups than they save
_DIRECT_BYTES = 16 << 10
_GATHER_BYTES = 64 << 10


@dataclass(slots=True)
class Batch:
    """Consecutive bytes of a piece, at most BATCH_BYTES, in canonical order."""

    views: list[memoryview] = field(default_factory=list)
    size: int = 0
    _short: list[tuple[Bytes, Bytes]] = field(default_factory=list)  # in the pool, in the scratch
    _staged: int = 0
    _open: int | None = None  # start of the last view in the scratch, if it is there

    def gather(self) -> None:
        """Before sending: copies short runs to the scratch."""
        for part, staged in self._short:
            staged[...] = part

    def scatter(self) -> None:
        """After receiving: copies short runs from the scratch."""
        for part, staged in self._short:
            part[...] = staged

    def add_direct(self, view: memoryview) -> None:
        self.views.append(view)
        self.size += len(view)
        self._open = None

    def add_short(self, part: Bytes, scratch: Bytes) -> None:
        end = self._staged + part.nbytes
        self._short.append((part, scratch[self._staged : end].reshape(part.shape)))
        if self._open is None:
            self._open = self._staged
        else:
            self.views.pop()
        self.views.append(scratch[self._open : end].data)
        self._staged = end
        self.size += part.nbytes


def batches_of(data: Bytes) -> Iterator[Batch]:
    """Batches of a contiguous array."""
    rest = data.data
    for start in range(0, len(rest), BATCH_BYTES):
        batch = Batch()
        batch.add_direct(rest[start : start + BATCH_BYTES])
        yield batch


def batches(pool: PoolMap, span: PoolSpan, scratch: Bytes) -> Iterator[Batch]:
    """Batches of a span. `scratch` [BATCH_BYTES] holds the short runs of one: finish with it before the next."""
    batch = Batch()
    for part in pool.slices(span):
        for strip in _strips(part):
            if strip.nbytes >= _DIRECT_BYTES and strip.flags.c_contiguous:
                rest = strip.reshape(-1).data
                while len(rest) > 0:
                    room = BATCH_BYTES - batch.size
                    batch.add_direct(rest[:room])
                    rest = rest[room:]
                    if batch.size == BATCH_BYTES:
                        yield batch
                        batch = Batch()
                continue
            if batch.size + strip.nbytes > BATCH_BYTES:
                yield batch
                batch = Batch()
            batch.add_short(strip, scratch)
    if batch.size:
        yield batch


def _strips(part: Bytes) -> Iterator[Bytes]:
    """Splits a part into strips that are contiguous or small enough to gather."""
    if part.flags.c_contiguous or part.nbytes <= _DIRECT_BYTES:
        yield part
    elif part[0].nbytes >= _DIRECT_BYTES:
        for inner in part:
            yield from _strips(inner)
    else:
        step = max(1, _GATHER_BYTES // part[0].nbytes)
        for start in range(0, len(part), step):
            yield part[start : start + step]
