"""Registers the metrics that are read at scrape time: workers, cost, process, build."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.observe.export import ExportOutcome, TraceExport
from router.observe.metrics.cost import CostCollector, CostMeter, ranks_of
from router.observe.metrics.process import LoopLag
from router.observe.metrics.workers import WorkerCollector, parse_places
from router.workers.directory import DirectoryFollower
from router.workers.fleet import Fleet
from tandem.clock import Clock
from tandem.config.launch import RouterLaunch
from tandem.v1 import cluster_pb2
from tandem.version import tandem_version


class ScrapedMetrics:
    """The collectors in `registry` that are read at a scrape. `start` needs a running event loop."""

    def __init__(
        self, registry: CollectorRegistry, launch: RouterLaunch, fleet: Fleet, export: TraceExport | None, clock: Clock
    ) -> None:
        self._registry = registry
        self._workers = WorkerCollector(fleet)
        self._lag = LoopLag()
        price = launch.observability.cost.per_rank_hour
        self._cost = None if price is None else CostMeter(price, clock)
        self._autoscaler = _AutoscalerCollector()
        registry.register(self._workers)
        registry.register(self._autoscaler)
        registry.register(self._lag)
        registry.register(_RouterCollector(launch.router_id, export))
        if self._cost is not None:
            registry.register(CostCollector(self._cost, fleet))
        ProcessCollector(registry=registry)

    def set_directory(self, directory: cluster_pb2.Directory) -> None:
        """Updates the expected workers. If the controller sends no places, only listed workers count."""
        self._workers.places = parse_places(directory.places)
        self._autoscaler.counts = dict(directory.autoscaler_decisions)
        if self._cost is not None:
            self._cost.set_ranks(ranks_of(self._workers.places.values()))

    def watch_directory(self, follower: DirectoryFollower) -> None:
        self._registry.register(_ControllerCollector(follower))

    def start(self) -> None:
        self._lag.start()

    def close(self) -> None:
        self._lag.close()


class _AutoscalerCollector(Collector):
    """`counts`: decisions by action, from the controller's last report; empty: there is no autoscaler."""

    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        if not self.counts:
            return
        decisions = CounterMetricFamily(
            "tandem_autoscaler_decisions",
            "Pool changes decided by the autoscaler; every router reports the same counts.",
            labels=("action",),
        )
        for action, count in self.counts.items():
            decisions.add_metric((action,), count)
        yield decisions


class _ControllerCollector(Collector):
    def __init__(self, follower: DirectoryFollower) -> None:
        self._follower = follower

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "tandem_controller_up", "Whether this router follows the controller.", float(self._follower.connected)
        )


class _RouterCollector(Collector):
    def __init__(self, router_id: str, export: TraceExport | None) -> None:
        self._labels = (tandem_version(), platform.python_version(), router_id)
        self._export = export

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "tandem_build_info", "Versions of this router.", labels=("version", "python", "router")
        )
        build.add_metric(self._labels, 1)
        yield build
        if self._export is None:
            return
        traces = CounterMetricFamily("tandem_traces", "Sampled requests by export outcome.", labels=["outcome"])
        for outcome in ExportOutcome:
            traces.add_metric([outcome.value], self._export.outcomes[outcome])
        yield traces
