"""The digest of a piece: xxh3_64 over its valid bytes in canonical order (block, layer, K/V, head, token).

It covers the bytes as sent, so it works for any reshard. It detects corruption and mix-ups; the ticket's signature and,
between hosts, TLS protect against forgery.

It is computed during the copy: by native code in one pass if available, else by the xxhash package, which rereads each
stretch while it is in the CPU's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import numpy as np
import xxhash

from kvtransfer.pool.pool import Bytes, Copier, PoolMap, PoolSpan, payload_bytes
from tandem.errors import ConfigError
from tandem.native.digest import SHORTEST_BYTES, STRIPE_BYTES, NativeDigest, checked_library

log = logging.getLogger(__name__)

STREAM_BYTES = 512 << 10  # pool to pool: non-temporal stores (agent/env.py) keep the source cached
STAGE_BYTES = 256 << 10  # through buffers that are read next: half of a core's L2 cache
_DIRECT_BYTES = 16 << 10  # contiguous parts of this size are hashed in place
_GATHER_BYTES = 1 << 20  # smaller parts are gathered first, this much at a time, to stay in the cache


class Digest(Copier, Protocol):
    """Receives a piece's parts in canonical order, while copying or reading them."""

    def feed(self, part: Bytes) -> None: ...

    def value(self) -> int: ...


def start_digest(size_bytes: int, grain_bytes: int = 1) -> Digest:
    """A digest of `size_bytes` bytes in parts whose contiguous rows are multiples of `grain_bytes`."""
    if grain_bytes % STRIPE_BYTES or size_bytes < SHORTEST_BYTES or (library := native()) is None:
        return XxhashDigest()
    return NativeDigest(size_bytes, library)


@cache
def native() -> Any | None:
    """The native library. The first call on a machine compiles it, which takes about a second."""
    try:
        return checked_library()
    except ConfigError as error:
        log.warning("using the slower xxhash package for digests: %s", error.message)
        return None


def digest_of(pool: PoolMap, span: PoolSpan) -> int:
    """The 64-bit digest of a span of a pool."""
    digest = _of_span(pool, span)
    for part in pool.slices(span):
        digest.feed(part)
    return digest.value()


def copy_and_digest(target: PoolMap, source: PoolMap, read: PoolSpan, write: PoolSpan) -> int:
    """Copies a piece between pools; returns the digest of its source.

    The source may change until its owner confirms with FINISH that it did not. Any change leads to another digest. Our
    own blocks need no second check, because only this process writes to them.
    """
    digest = _of_span(target, write)
    target.copy_from(source, read, write, digest)
    return digest.value()


def digest_of_bytes(data: bytes | memoryview) -> int:
    """The digest of bytes that are already in canonical order."""
    return int(xxhash.xxh3_64_intdigest(data))


def _of_span(pool: PoolMap, span: PoolSpan) -> Digest:
    layout = pool.layout
    size = payload_bytes(layout, len(span.block_ids), span.last_block_tokens, span.layer_count, span.head_count)
    return start_digest(size, layout.token_bytes)


class XxhashDigest:
    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()

    def copy(self, target: Bytes, source: Bytes, *, past_cache: bool) -> None:
        for target_part, source_part in _chunks(target, source, STREAM_BYTES if past_cache else STAGE_BYTES):
            np.copyto(target_part, source_part)
            self.feed(source_part if past_cache or not target_part.flags.c_contiguous else target_part)

    def feed(self, part: Bytes) -> None:
        if part.flags.c_contiguous:
            self._hasher.update(part.data)
        elif part.nbytes <= _GATHER_BYTES and part[0].nbytes < _DIRECT_BYTES:
            self._hasher.update(np.ascontiguousarray(part).data)
        elif len(part) > 1 and part[0].nbytes < _DIRECT_BYTES:
            step = max(1, _GATHER_BYTES // part[0].nbytes)
            for start in range(0, len(part), step):
                self.feed(part[start : start + step])
        else:
            for inner in part:
                self.feed(inner)

    def value(self) -> int:
        return int(self._hasher.intdigest())


def _chunks(a: Bytes, b: Bytes, size: int) -> Iterator[tuple[Bytes, Bytes]]:
    """Splits two arrays of one shape into parts of about `size` bytes, in order.

    They are split flat if both are contiguous, else along the first axis that makes parts small enough.
    """
    if a.nbytes <= size:
        yield a, b
    elif a.flags.c_contiguous and b.flags.c_contiguous:
        a, b = a.reshape(-1), b.reshape(-1)
        for start in range(0, a.size, size):
            yield a[start : start + size], b[start : start + size]
    elif a[0].nbytes >= size:
        for each_a, each_b in zip(a, b, strict=True):
            yield from _chunks(each_a, each_b, size)
    else:
        step = size // a[0].nbytes
        for start in range(0, len(a), step):
            yield a[start : start + step], b[start : start + step]
