"""Ends requests at their clients' deadlines, wherever they are."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tandem.clock import Clock

DEADLINE_SLACK_S = 0.05  # a client that leaves so shortly before its deadline left because of it


class Expiring(Protocol):
    def expire(self) -> None:
        """Its deadline has passed."""


class Deadlines:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[Expiring, asyncio.TimerHandle] = {}

    def watch(self, request: Expiring, deadline_s: float | None) -> None:
        """None: it has none."""
        if deadline_s is not None:
            left_s = max(0.0, deadline_s - self._clock.now_s())
            self._timers[request] = asyncio.get_running_loop().call_later(left_s, request.expire)

    def over(self, request: Expiring) -> None:
        """It has ended. Idempotent."""
        if (timer := self._timers.pop(request, None)) is not None:
            timer.cancel()
