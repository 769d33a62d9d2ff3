"""Virtual time: what happens next, and when. Events of one instant happen in the order in which they were made."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Also the `tandem.clock.Clock` of everything that is simulated."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def now_s(self) -> float:
        return self._now_s

    def at(self, at_s: float, happen: Callable[..., None], *args: object) -> None:
        """Not before now."""
        self._made += 1
        heapq.heappush(self._events, (max(at_s, self._now_s), self._made, happen, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Until nothing is left to happen or `until` is true, which is asked after each event."""
        events = self._events
        while events:
            self._now_s, _, happen, args = heapq.heappop(events)
            happen(*args)
            if until():
                return
