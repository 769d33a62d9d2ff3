"""Whether this router has no more of a resource of its machine."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.telemetry.resource_watch import Resource, ResourceWatch


class ResourceMetrics(Collector):
    """Reads the watch at every scrape."""

    def __init__(self, registry: CollectorRegistry, watch: ResourceWatch) -> None:
        self._watch = watch
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tandem_resource_exhausted", "1: this router's machine has no more of the resource.", labels=("resource",)
        )
        for each in Resource:
            family.add_metric((each.value,), float(each in self._watch.exhausted))
        yield family
