"""How long to wait before the next try of what failed."""

from __future__ import annotations

import asyncio


class Backoff:
    """Waits `first_s`, then twice as long each time, at most `most_s`."""

    def __init__(self, *, first_s: float, most_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._most_s = most_s

    async def wait(self) -> None:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        await asyncio.sleep(wait_s)

    def reset(self) -> None:
        """After a success."""
        self._next_s = self._first_s

    def skip_to_most(self) -> None:
        """After a failure that a quick retry cannot mend."""
        self._next_s = self._most_s
