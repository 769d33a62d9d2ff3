"""Notices an engine that hangs for good: no step, no layer and no answer for so long that it has to be replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

ASK_EVERY_S = 1.0


class HangWatch:
    """`ask` makes the leader send a message, which it does between two steps; every message counts as progress.

    Time in which this process did not run either, as on a suspended host, does not count.
    """

    def __init__(self, ask: Callable[[], None], limit_s: float) -> None:
        self._ask = ask
        self._limit_s = limit_s
        self._silent_s = 0.0

    def heard(self) -> None:
        self._silent_s = 0.0

    def passed(self, elapsed_s: float, tick_s: float) -> bool:
        """Counts `elapsed_s` since the last call, which was due after `tick_s`. Returns whether the engine hangs."""
        if not self._silent_s:
            self._ask()
        self._silent_s += min(elapsed_s, 2 * tick_s)
        return self._silent_s > self._limit_s

    async def run(self) -> None:
        """Returns when the engine hangs."""
        tick_s, last_s = min(ASK_EVERY_S, self._limit_s / 4), time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            elapsed_s, last_s = time.monotonic() - last_s, time.monotonic()
            if self.passed(elapsed_s, tick_s):
                return
