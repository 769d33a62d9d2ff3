"""Virtual time: a queue of callbacks. Those due at the same time run in the order in which they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Also the `tandem.clock.Clock` of all simulated parts."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def now_s(self) -> float:
        return self._now_s

    def call_at(self, at_s: float, callback: Callable[..., None], *args: object) -> None:
        """Schedules `callback(*args)`; a time in the past means now."""
        self._made += 1
        heapq.heappush(self._events, (max(at_s, self._now_s), self._made, callback, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Runs until the queue is empty or `until`, checked after each event, returns True."""
        events = self._events
        while events:
            self._now_s, _, callback, args = heapq.heappop(events)
            callback(*args)
            if until():
                return
