"""How late the event loop is: what every token of every request waits for. A gauge of the router's own health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

EVERY_S = 0.25
WINDOW_S = 10.0


class LoopLag(Collector):
    """The worst of the last window, or of the one that is under way."""

    def __init__(self) -> None:
        self._last_s = self._now_s = 0.0
        self._window_ends_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._window_ends_s = loop.time() + WINDOW_S
        self._timer = loop.call_later(EVERY_S, self._tick, loop, loop.time() + EVERY_S)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        worst_s = max(self._last_s, self._now_s)
        yield GaugeMetricFamily("tandem_event_loop_lag_seconds", "How late the event loop was at worst.", worst_s)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._now_s = max(self._now_s, now_s - due_s)
        if now_s >= self._window_ends_s:
            self._last_s, self._now_s = self._now_s, 0.0
            self._window_ends_s = now_s + WINDOW_S
        self._timer = loop.call_later(EVERY_S, self._tick, loop, now_s + EVERY_S)
