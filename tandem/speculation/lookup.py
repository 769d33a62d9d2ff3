"""Prompt look-up: what followed the last tokens when they came before, in the prompt or the answer.

After Saxena, "Prompt Lookup Decoding" (2023), and Yang et al., "Inference with Reference" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 3  # tokens that have to agree
MAX_MATCH = 32  # tokens compared before a place; a longer match says no more
MAX_PLACES = 8  # compared, the latest ones
INDEXED_AT_ONCE = 4096  # about 1 ms


@dataclass(frozen=True, slots=True)
class Found:
    """`tokens` followed the last `match` tokens before."""

    tokens: tuple[int, ...]
    match: int


class TokenIndex:
    """Where each three tokens of one request end. A long prompt is indexed over several calls."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0  # tokens

    def find(self, tokens: Sequence[int], most: int) -> Found | None:
        """At most `most` tokens that may follow `tokens`, which only grow from call to call."""
        self._index(tokens)
        length = len(tokens)
        if length < GRAM or most < 1:
            return None
        places = self._places.get(tuple(tokens[length - GRAM :]), ())
        best, match = None, 0
        for place in reversed(places[-MAX_PLACES:]):
            if (agreeing := _agreeing(tokens, place)) > match:
                best, match = place, agreeing
        if best is None:
            return None
        return Found(tuple(tokens[best : best + most]), match)

    def _index(self, tokens: Sequence[int]) -> None:
        """All but the last three tokens: what follows them is what is asked for."""
        end = min(len(tokens) - 1, self._indexed + INDEXED_AT_ONCE)
        for place in range(max(GRAM, self._indexed + 1), end + 1):
            self._places.setdefault(tuple(tokens[place - GRAM : place]), []).append(place)
        self._indexed = max(self._indexed, end)


def _agreeing(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` equal the last ones."""
    length, count = len(tokens), 0
    while count < min(MAX_MATCH, place) and tokens[place - 1 - count] == tokens[length - 1 - count]:
        count += 1
    return count
