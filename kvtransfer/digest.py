"""The digest of a piece: xxh3_64 over its valid bytes in canonical order (block, layer, K/V, head, token).

It covers the bytes as sent, so it holds for any reshard. It finds corruption and mix-ups; against forgery stand the
ticket's signature and, between hosts, TLS.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from kvtransfer.pool import Bytes, PoolMap, Span

_DIRECT_BYTES = 16 << 10  # contiguous parts of this size are hashed where they lie
_GATHER_BYTES = 1 << 20   # smaller ones are gathered first, this much at a time: it stays in the CPU's cache


def digest_of(pool: PoolMap, span: Span) -> int:
    """The 64-bit digest of a span of a pool."""
    hasher = xxhash.xxh3_64()
    for part in pool.slices(span):
        _feed(hasher, part)
    return int(hasher.intdigest())


def copy_and_digest(target: PoolMap, source: PoolMap, read: Span, write: Span) -> int:
    """Copies a piece between pools; returns the digest of its source, each part read again right after it was copied.

    The source may change under us until its owner has proved that it did not (FINISH). Whatever it changes to, early
    or late, the digest is then another one; and our own blocks need no second look, as nobody else writes to them.
    """
    hasher = xxhash.xxh3_64()
    target.copy_from(source, read, write, feeder(hasher))
    return int(hasher.intdigest())


def digest_of_bytes(data: bytes | memoryview) -> int:
    """The digest of bytes that are already in canonical order."""
    return int(xxhash.xxh3_64_intdigest(data))


def feeder(hasher: xxhash.xxh3_64) -> Callable[[Bytes], None]:
    """What takes parts in canonical order as they are copied."""
    return lambda part: _feed(hasher, part)


def _feed(hasher: xxhash.xxh3_64, part: Bytes) -> None:
    if part.flags.c_contiguous:
        hasher.update(part.data)
    elif part.nbytes <= _GATHER_BYTES and part[0].nbytes < _DIRECT_BYTES:
        hasher.update(np.ascontiguousarray(part).data)
    elif len(part) > 1 and part[0].nbytes < _DIRECT_BYTES:
        step = max(1, _GATHER_BYTES // part[0].nbytes)
        for start in range(0, len(part), step):
            _feed(hasher, part[start : start + step])
    else:
        for inner in part:
            _feed(hasher, inner)
