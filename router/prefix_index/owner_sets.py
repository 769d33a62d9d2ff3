"""Sets of owners, each stored once: a block refers to its set by number.

Most blocks belong to the same few combinations of workers. So the memory of a set is paid once, for any number of
workers, and removing a worker changes the sets instead of millions of blocks.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

NO_OWNER = 0  # the number of the empty set

SetNumbers = NDArray[np.int64]


class OwnerSets:
    """An owner is one bit; a set is a bit mask. There are at most `limit` sets; blocks that need another are lost."""

    def __init__(self, limit: int) -> None:
        self._masks = [0]
        self._refs = [0]  # blocks with the number; not counted for the empty set
        self._by_mask = {0: NO_OWNER}
        self._unused: list[int] = []
        self._limit = limit
        self.vacant = np.zeros(limit, dtype=np.bool_)  # by number: whether the set is empty
        self.vacant[NO_OWNER] = True
        self.lost = 0  # blocks whose owner was not recorded, or was removed, for lack of a set

    @property
    def owned(self) -> int:
        """Blocks with at least one owner."""
        return sum(refs for refs, mask in zip(self._refs, self._masks, strict=True) if mask)

    def mask(self, number: int) -> int:
        return self._masks[number]

    def number_of(self, mask: int) -> int | None:
        """The number of a set, new if needed. None if there are `limit` sets already."""
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
        """Adds `blocks` references to a number."""
        self._refs[number] += blocks

    def leave(self, numbers: SetNumbers) -> None:
        """Removes one reference to each of these numbers."""
        for number, blocks in _counted(numbers.tolist()):
            if number != NO_OWNER:
                self._release(number, blocks)

    def with_owner(self, numbers: SetNumbers, owner: int) -> SetNumbers:
        """The new numbers of blocks with `numbers` after `owner` is added to their sets."""
        return self._moved(numbers, owner, adding=True)

    def without_owner(self, numbers: SetNumbers, owner: int) -> SetNumbers:
        return self._moved(numbers, owner, adding=False)

    def drop(self, owner: int) -> None:
        """Removes an owner from every set. Sets that become equal keep their numbers."""
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
            if new is None:  # may lose credit, must not invent it
                self.lost += blocks
                if adding:
                    continue
                new = NO_OWNER
            if new != NO_OWNER:
                self.join(new, blocks)
            if old != NO_OWNER:
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
    """The count of each number, in order. For the few blocks of an event, this is faster than np.unique."""
    return sorted(Counter(numbers).items())
