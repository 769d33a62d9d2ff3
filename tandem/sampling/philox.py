"""Philox4x32-10, the counter-based generator of Salmon et al. (SC'11, "Parallel random numbers: as easy as 1, 2, 3").

Noise is a pure function of (seed, position, token id), so a request draws the same noise on any worker, in any batch
and after any migration. One call gives four words for four neighbouring tokens: token t at position p has word `t % 4`
of counter (t // 4, p, 0, 0), with the 64-bit seed as key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

M0, M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of the counters
W0, W1 = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
ROUNDS = 10
WORDS = 4

Words = NDArray[np.uint64]  # 32-bit words in 64 bits, so that products do not overflow


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over arrays of counters, all under one key."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    m0, m1 = np.uint64(M0), np.uint64(M1)
    for _ in range(ROUNDS):
        product0, product1 = x0 * m0, x2 * m1
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ np.uint64(k0),
            product1 & _MASK,
            (product0 >> _SHIFT) ^ x3 ^ np.uint64(k1),
            product0 & _MASK,
        )
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return x0, x1, x2, x3


def _rows(seed: int, position: int, groups: Words) -> Words:
    """[groups, 4] words: those of tokens 4g to 4g + 3 for each group g."""
    zero = np.zeros_like(groups)
    counter = (groups, np.full_like(groups, position), zero, zero)
    return np.stack(philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)), axis=-1)


def words_of(seed: int, position: int, token_ids: NDArray[np.int64]) -> Words:
    """The word of each token id, of which there is at least one."""
    last_group = int(token_ids.max()) // WORDS
    if len(token_ids) > last_group:  # drawing for every token up to the last is then less work
        return _rows(seed, position, np.arange(last_group + 1, dtype=np.uint64)).ravel()[token_ids]
    rows = _rows(seed, position, token_ids.astype(np.uint64) // np.uint64(WORDS))
    return rows[np.arange(len(token_ids)), token_ids % WORDS]


def gumbel(words: Words) -> NDArray[np.float64]:
    """Standard Gumbel noise. A word w is the uniform 1 - (w + ½) / 2³², so small words give large noise in full
    precision."""
    noise: NDArray[np.float64] = -np.log(-np.log1p(-exceedance(words)))
    return noise


def exceedance(words: Words) -> NDArray[np.float64]:
    """1 - u of each word's uniform u, within [2⁻³³, 1 - 2⁻³³]."""
    return (words.astype(np.float64) + 0.5) * 2.0**-32


# The largest noise, because no uniform exceeds 1 - 2⁻³³.
GUMBEL_MAX = float(-np.log(-np.log1p(-(2.0**-33))))
