"""Metrics of the prefix index, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.prefix_index.follower import IndexFault, PrefixFollower
from router.prefix_index.mirror import PrefixMirror


class IndexCollector(Collector):
    def __init__(self, mirror: PrefixMirror, follower: PrefixFollower | None) -> None:
        self._mirror = mirror
        self._follower = follower

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield GaugeMetricFamily("tandem_index_blocks", "Distinct blocks in the prefix index.", len(self._mirror))
        yield GaugeMetricFamily("tandem_index_workers", "Workers in the prefix index.", len(self._mirror.workers()))
        yield CounterMetricFamily(
            "tandem_index_lost_blocks",
            "Blocks not recorded because router.index_memory_bytes is too small.",
            self._mirror.lost_blocks,
        )
        if self._follower is None:
            return
        yield GaugeMetricFamily("tandem_index_redis_up", "Whether Redis answers.", float(self._follower.connected))
        faults = CounterMetricFamily(
            "tandem_index_faults", "Times a worker's blocks were dropped or its data was unreadable.", labels=["fault"]
        )
        for fault in IndexFault:
            faults.add_metric([fault.value], self._follower.faults.get(fault, 0))
        yield faults
