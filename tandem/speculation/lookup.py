"""Prompt look-up: what followed the last tokens when they came before, in the prompt or the answer.

After Saxena, "Prompt Lookup Decoding" (2023), and Yang et al., "Inference with Reference" (2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 3  # tokens that have to agree
MAX_MATCH = 32  # tokens compared before a place
MAX_PLACES = 8  # compared, the latest ones
_KEY_BITS = 32  # of a token


@dataclass(frozen=True, slots=True)
class Found:
    """`tokens` followed the last `match` tokens before."""

    tokens: tuple[int, ...]
    match: int


class TokenIndex:
    """Where each three tokens of one request end. About 130 bytes for each token."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # place after three tokens, the latest one
        self._before = array("i", [0] * GRAM)  # of each place that with the same three tokens before it; 0: none

    def lag(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` are still to be indexed."""
        return max(0, len(tokens) - len(self._before))

    def extend(self, tokens: Sequence[int], most: int) -> None:
        """Indexes at most `most` more of `tokens`, which only grow from call to call: all but the last three, for what
        follows those is what is looked for."""
        for place in range(len(self._before), min(len(tokens), len(self._before) + most)):
            key = _key(tokens, place)
            self._before.append(self._last.get(key, 0))
            self._last[key] = place

    def find(self, tokens: Sequence[int], most: int) -> Found | None:
        """At most `most` tokens that may follow `tokens`: after the longest match, of equal ones where most follow."""
        length = len(tokens)
        if length < GRAM or most < 1:
            return None
        best = (0, 0, 0)  # match, tokens after it, place
        place = self._last.get(_key(tokens, length), 0)
        for _ in range(MAX_PLACES):
            if not place:
                break
            best = max(best, (_agreeing(tokens, place), min(most, length - place), place))
            place = self._before[place]
        match, count, place = best
        return Found(tuple(tokens[place : place + count]), match) if match else None


def _key(tokens: Sequence[int], place: int) -> int:
    """Of the three tokens before `place`."""
    one, two, three = tokens[place - GRAM : place]
    return (one << 2 * _KEY_BITS) | (two << _KEY_BITS) | three


def _agreeing(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` equal the last ones."""
    length, count = len(tokens), GRAM
    while count < min(MAX_MATCH, place) and tokens[place - 1 - count] == tokens[length - 1 - count]:
        count += 1
    return count
