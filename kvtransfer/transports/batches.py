"""A span's bytes as lists of buffers for scatter-gather input and output.

Long contiguous runs are used where they lie in the pool; short ones go through a scratch buffer, which costs less than
handing each to the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtransfer.pool.pool import Bytes, PoolMap, PoolSpan, make_staging

BATCH_BYTES = 2 << 20  # hashed while it is in the CPU's last cache; smaller ones cost more wakings than they save
_DIRECT_BYTES = 16 << 10
_GATHER_BYTES = 64 << 10


def make_scratch() -> Bytes:
    """What the short runs of one batch fit in."""
    return make_staging(BATCH_BYTES)


@dataclass(slots=True)
class Batch:
    """Neighbouring bytes of a piece, at most BATCH_BYTES, in canonical order."""

    views: list[memoryview] = field(default_factory=list)
    size: int = 0
    _short: list[tuple[Bytes, Bytes]] = field(default_factory=list)  # in the pool, in the scratch
    _staged: int = 0
    _open: int | None = None  # where the last view begins in the scratch, if it lies there

    def gather(self) -> None:
        """Before sending: short runs into the scratch."""
        for part, staged in self._short:
            staged[...] = part

    def scatter(self) -> None:
        """After receiving: short runs out of the scratch."""
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
    """All of a contiguous array."""
    rest = data.data
    for start in range(0, len(rest), BATCH_BYTES):
        batch = Batch()
        batch.add_direct(rest[start : start + BATCH_BYTES])
        yield batch


def batches(pool: PoolMap, span: PoolSpan, scratch: Bytes) -> Iterator[Batch]:
    """All of a span; each batch must be done with before the next is asked for: they share the scratch."""
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
    """Contiguous, or small enough to be gathered."""
    if part.flags.c_contiguous or part.nbytes <= _DIRECT_BYTES:
        yield part
    elif part[0].nbytes >= _DIRECT_BYTES:
        for inner in part:
            yield from _strips(inner)
    else:
        step = max(1, _GATHER_BYTES // part[0].nbytes)
        for start in range(0, len(part), step):
            yield part[start : start + step]
