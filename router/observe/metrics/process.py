"""What holds up this process: how late its event loop is, and a resource of the machine that it has no more of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.telemetry.resource_watch import Resource, ResourceWatch

EVERY_S = 0.25
WINDOW_S = 10.0


class LoopLag(Collector):
    """How late the event loop runs its timers, which every token of every request may see: the worst lag of the last
    window and the open one."""

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
        yield GaugeMetricFamily("tandem_event_loop_lag_seconds", "Worst recent lag of the event loop.", worst_s)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._now_s = max(self._now_s, now_s - due_s)
        if now_s >= self._window_ends_s:
            self._last_s, self._now_s = self._now_s, 0.0
            self._window_ends_s = now_s + WINDOW_S
        self._timer = loop.call_later(EVERY_S, self._tick, loop, now_s + EVERY_S)


class ResourceCollector(Collector):
    """Reads the watch at every scrape."""

    def __init__(self, watch: ResourceWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tandem_resource_exhausted", "1: this router's machine has no more of the resource.", labels=("resource",)
        )
        for each in Resource:
            family.add_metric((each.value,), float(each in self._watch.exhausted))
        yield family
