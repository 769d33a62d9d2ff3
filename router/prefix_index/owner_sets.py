"""Sets of owners, each kept once: a block carries the number of its set instead of the set.

Most blocks are held by the same few combinations of workers. So a set costs its memory once, may name any number of
workers, and a worker that leaves is struck from the sets, never from millions of blocks.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

NOBODY = 0  # the number of the empty set

SetNumbers = NDArray[np.int64]


class OwnerSets:
    """An owner is one bit; a set is a bit mask. At most `limit` different sets; what needs more is lost and counted."""

    def __init__(self, limit: int) -> None:
        self._masks = [0]
        self._refs = [0]  # blocks that carry the number; of the empty set not counted
        self._by_mask = {0: NOBODY}
        self._unused: list[int] = []
        self._limit = limit
        self.vacant = np.zeros(limit, dtype=np.bool_)  # by number: nobody owns what carries it
        self.vacant[NOBODY] = True
        self.lost = 0  # blocks whose owner could not be noted or had to be forgotten

    @property
    def owned(self) -> int:
        """Blocks that somebody owns."""
        return sum(refs for refs, mask in zip(self._refs, self._masks, strict=True) if mask)

    def mask(self, number: int) -> int:
        return self._masks[number]

    def number_of(self, mask: int) -> int | None:
        """None: there are `limit` others already."""
        number = self._by_mask.get(mask)
        if number is not None:
            return number
        if self._unused:
            number = self._unused.pop()
            self._masks[number] = mask
        elif len(self._masks) < self._limit:
            number = len(self._masks)
            self._masks.append(mask)
            self._refs.append(0)
        else:
            return None
        self._by_mask[mask] = number
        self.vacant[number] = False
        return number

    def join(self, number: int, blocks: int) -> None:
        """`blocks` more blocks carry the number."""
        self._refs[number] += blocks

    def leave(self, numbers: SetNumbers) -> None:
        """Blocks that carried these numbers are overwritten."""
        for number, blocks in _counted(numbers.tolist()):
            if number != NOBODY:
                self._release(number, blocks)

    def with_owner(self, numbers: SetNumbers, owner: int) -> SetNumbers:
        """The numbers that blocks carrying `numbers` carry once `owner` holds them too."""
        return self._moved(numbers, owner, adding=True)

    def without_owner(self, numbers: SetNumbers, owner: int) -> SetNumbers:
        return self._moved(numbers, owner, adding=False)

    def drop(self, owner: int) -> None:
        """Strikes an owner from every set. Sets that become equal keep their numbers."""
        for number, mask in enumerate(self._masks):
            if mask & owner:
                self._rename(number, mask & ~owner)
                if not self._refs[number] and not self._masks[number]:
                    self._unused.append(number)

    def _moved(self, numbers: SetNumbers, owner: int, *, adding: bool) -> SetNumbers:
        olds = numbers.tolist()
        news: dict[int, int] = {}
        for old, blocks in _counted(olds):
            news[old] = old
            mask = self._masks[old]
            wanted = mask | owner if adding else mask & ~owner
            if wanted == mask:
                continue
            new = self.number_of(wanted)
            if new is None:  # losing credit is allowed, inventing it is not
                self.lost += blocks
                if adding:
                    continue
                new = NOBODY
            if new != NOBODY:
                self.join(new, blocks)
            if old != NOBODY:
                self._release(old, blocks)
            news[old] = new
        return np.array([news[old] for old in olds], dtype=np.int64)

    def _release(self, number: int, blocks: int) -> None:
        self._refs[number] -= blocks
        if not self._refs[number]:
            self._rename(number, 0)
            self._unused.append(number)

    def _rename(self, number: int, mask: int) -> None:
        old = self._masks[number]
        if old and self._by_mask.get(old) == number:
            del self._by_mask[old]
        self._masks[number] = mask
        if mask:
            self._by_mask.setdefault(mask, number)
        else:
            self.vacant[number] = True


def _counted(numbers: list[int]) -> list[tuple[int, int]]:
    """How often each occurs, in order. Not np.unique: it takes longer for the few blocks of an event."""
    return sorted(Counter(numbers).items())
