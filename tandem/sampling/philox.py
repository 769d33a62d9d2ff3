"""Philox4x32-10, the counter-based generator of Salmon et al. (SC'11, "Parallel random numbers: as easy as 1, 2, 3").

Noise is a pure function of (seed, position, token id): no state, so the same request draws the same noise on any worker,
in any batch, after any migration.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
ROUNDS = 10

Words = NDArray[np.uint64]  # 32-bit words, held in 64 bits so that products do not overflow


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over arrays of counters, all under one key."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = x0 * _M0, x2 * _M1
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ np.uint64(k0),
            product1 & _MASK,
            (product0 >> _SHIFT) ^ x3 ^ np.uint64(k1),
            product0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return x0, x1, x2, x3


def gumbel(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for each token id, from 53-bit uniforms in (0, 1)."""
    ids = token_ids.astype(np.uint64)
    zero = np.zeros_like(ids)
    where = np.full_like(ids, position)
    high, low, _, _ = philox4x32((ids, where, zero, zero), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    bits = ((high << _SHIFT) | low) >> np.uint64(12)  # 52 bits, so that the centre of each cell is exact
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


# Noise lies within these bounds because the uniforms lie within [2^-53, 1 - 2^-53].
GUMBEL_MIN = float(-np.log(-np.log(2.0**-53)))
GUMBEL_MAX = float(-np.log(2.0**-53))
