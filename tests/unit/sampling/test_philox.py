"""Philox is the published generator, and its noise depends on nothing but seed, position and token id."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.sampling.philox import GUMBEL_MAX, gumbel, philox4x32, words_of

# Known answers of philox4x32-10 from Random123's kat_vectors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in words(counter))
    k0, k1 = words(key)
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == words(expected)


def test_a_tokens_word_does_not_depend_on_which_others_are_asked_for() -> None:
    every = words_of(7, 3, np.arange(1003))
    for chosen in ([0], [1002], [5, 4, 900, 1], list(range(1, 1003, 2))):
        assert (words_of(7, 3, np.array(chosen)) == every[chosen]).all()


def test_seed_and_position_both_change_the_words_and_the_whole_seed_counts() -> None:
    ids = np.arange(64)
    draws = [words_of(seed, position, ids) for seed in (1, 2, 1 + 2**32, 2**64 - 1) for position in (0, 1)]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


def test_noise_is_bounded_and_keeps_apart_at_both_ends() -> None:
    ends = np.array([0, 1, 2**32 - 2, 2**32 - 1], dtype=np.uint64)
    noise = gumbel(ends)
    assert np.isfinite(noise).all()
    assert (np.diff(noise) < 0).all()
    assert noise[0] == GUMBEL_MAX


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel(words_of(0, 0, np.arange(200_000)))
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
