"""The memory that request bodies may take together, from their arrival until they are parsed."""

from __future__ import annotations

from tandem.errors import OverloadedError

LARGEST_BODIES = 64  # so many of the largest size may arrive at a time
EXEMPT_BYTES = 64 << 10  # of each body: most requests are smaller, and are never refused because of large ones


class BodyBudget:
    """Counts what bodies hold beyond EXEMPT_BYTES each, as it arrives: clients may declare more than they send."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Raises OverloadedError if the bodies of all clients would hold too much."""
        if self.held_bytes + count > self._max_bytes:
            raise OverloadedError(
                f"body: the bodies that the router receives now hold {self._max_bytes >> 20} MiB, the most they may: "
                "retry later, or send less",
                retry_after_s=1.0,
            )
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        self.held_bytes -= count
