"""Prompt look-up: what followed the last tokens when they came before, in the prompt, in the answer, or in what the
client predicts the answer to be.

After Saxena, "Prompt Lookup Decoding" (2023), and Yang et al., "Inference with Reference" (2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

GRAM = 3  # tokens that have to agree
MAX_MATCH = 32  # tokens compared before a place
MAX_PLACES = 8  # compared, the latest ones
REACH = 32  # tokens of a prediction around the place where the answer left it
_KEY_BITS = 32  # of a token


@dataclass(frozen=True, slots=True)
class Found:
    """`tokens` followed the last `match` tokens before, in the prediction or elsewhere."""

    tokens: tuple[int, ...]
    match: int
    from_prediction: bool = False


class TokenIndex:
    """What one request's tokens and its prediction hold. About 130 bytes for each of their tokens.

    Args:
        prediction: what the client expects the answer to be. It is only read, and belongs to this request alone.
        answer_from: how many tokens are before the answer.
    """

    def __init__(self, prediction: Sequence[int] = (), answer_from: int = 0) -> None:
        self._own, self._predicted = _Places(), _Places()
        self._prediction = prediction
        self._left = (answer_from, 0)  # after so many tokens, the answer was last at this place of the prediction

    def lag(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` and of the prediction are still to be indexed."""
        return self._predicted.lag(self._prediction) + self._own.lag(tokens)

    def extend(self, tokens: Sequence[int], most: int) -> None:
        """Indexes at most `most` more of the prediction and of `tokens`, which only grow from call to call."""
        lag = min(most, self._predicted.lag(self._prediction))
        self._predicted.extend(self._prediction, lag)
        self._own.extend(tokens, most - lag)

    def find(self, tokens: Sequence[int], most: int) -> Found | None:
        """At most `most` tokens that may follow `tokens`: after the longest match; of equal ones where most follow, and
        of those the prediction's."""
        if most < 1:
            return None
        own = _best(tokens, self._own.places(tokens), tokens, most)
        predicted = self._in_prediction(tokens, most)
        if not (own[0] or predicted[0]):
            return None
        is_own = own[:2] > predicted[:2]
        text, (match, count, place) = (tokens, own) if is_own else (self._prediction, predicted)
        return Found(tuple(text[place : place + count]), match, from_prediction=not is_own)

    def _in_prediction(self, tokens: Sequence[int], most: int) -> _Match:
        """Texts repeat themselves, so of equal matches the one near the expected place is taken."""
        if not self._prediction:
            return _NO_MATCH
        near = _best(self._prediction, self._near(tokens), tokens, most)
        anywhere = _best(self._prediction, self._predicted.places(tokens), tokens, most)
        best = near if near[0] >= anywhere[0] else anywhere
        if best[0] >= GRAM:
            self._left = (len(tokens), best[2])
        return best

    def _near(self, tokens: Sequence[int]) -> list[int]:
        """The place after a token that equals the last, nearest to where the prediction goes on if the answer has
        replaced as many tokens as it has. One token has to agree, so a changed word interrupts for two steps only."""
        last, place = self._left
        gone = len(tokens) - last
        if not 0 < gone <= REACH:
            return []
        text, expected = self._prediction, place + gone
        places = range(max(place + 1, expected - REACH), min(len(text), expected + REACH))
        near = [each for each in places if text[each - 1] == tokens[-1]]
        return sorted(near, key=lambda each: abs(each - expected))[:1]


class _Places:
    """Where each three tokens of one text end."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # place after three tokens, the latest one
        self._before = array("i", [0] * GRAM)  # of each place that with the same three tokens before it; 0: none

    def lag(self, text: Sequence[int]) -> int:
        return max(0, len(text) - len(self._before))

    def extend(self, text: Sequence[int], most: int) -> None:
        """Indexes all but the last three tokens, for what follows those is what is looked for."""
        for place in range(len(self._before), min(len(text), len(self._before) + most)):
            key = _key(text, place)
            self._before.append(self._last.get(key, 0))
            self._last[key] = place

    def places(self, tokens: Sequence[int]) -> Iterator[int]:
        """The latest places after three tokens that equal the last ones of `tokens`."""
        place = self._last.get(_key(tokens, len(tokens)), 0) if len(tokens) >= GRAM else 0
        for _ in range(MAX_PLACES):
            if not place:
                return
            yield place
            place = self._before[place]


_Match = tuple[int, int, int]  # tokens that agree, tokens after them, place
_NO_MATCH = (0, 0, 0)


def _best(text: Sequence[int], places: Iterable[int], tokens: Sequence[int], most: int) -> _Match:
    """The longest match before one of `places` of `text`."""
    return max(
        ((_agreeing(text, place, tokens), min(most, len(text) - place), place) for place in places), default=_NO_MATCH
    )


def _key(tokens: Sequence[int], place: int) -> int:
    """Of the three tokens before `place`."""
    one, two, three = tokens[place - GRAM : place]
    return (one << 2 * _KEY_BITS) | (two << _KEY_BITS) | three


def _agreeing(text: Sequence[int], place: int, tokens: Sequence[int]) -> int:
    """How many tokens of `text` before `place` equal the last of `tokens`."""
    length, count = len(tokens), 0
    most = min(MAX_MATCH, place, length)
    while count < most and text[place - 1 - count] == tokens[length - 1 - count]:
        count += 1
    return count
