"""The memory that request bodies may take together, from their arrival until they are parsed."""

from __future__ import annotations

from collections import Counter

from tandem.errors import OverloadedError

LARGEST_BODIES = 64  # so many of the largest size may arrive at a time
SHARE_OF_ONE = 4  # one key, or one address without keys, may hold a quarter
EXEMPT_BYTES = 64 << 10  # of each body: most requests are smaller, and are never refused because of large ones


class BodyBudget:
    """Counts what bodies hold beyond EXEMPT_BYTES each, as it arrives: clients may declare more than they send."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_of_one = max_bytes // SHARE_OF_ONE
        self._of_one: Counter[str] = Counter()
        self.held_bytes = 0

    def take(self, caller: str, count: int) -> None:
        """Raises OverloadedError if the bodies of all clients, or of this key or address, would hold too much."""
        if self.held_bytes + count > self._max_bytes:
            raise _full("the bodies that the router receives", self._max_bytes)
        if self._of_one[caller] + count > self._max_of_one:
            raise _full("the bodies that the router receives of one key or address", self._max_of_one)
        self.held_bytes += count
        self._of_one[caller] += count

    def give_back(self, caller: str, count: int) -> None:
        self.held_bytes -= count
        self._of_one[caller] -= count
        if not self._of_one[caller]:
            del self._of_one[caller]


def _full(bodies: str, max_bytes: int) -> OverloadedError:
    text = f"body: {bodies} now hold {max_bytes >> 20} MiB, the most they may: retry later, or send less"
    return OverloadedError(text, retry_after_s=1.0)
