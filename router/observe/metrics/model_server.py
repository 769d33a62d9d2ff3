"""Metrics under vLLM's names, for what reads those: dashboards, scalers, and the Gateway API's endpoint picker.

That looks for the gauges: https://gateway-api-inference-extension.sigs.k8s.io, Model Server Protocol.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.observe.metrics.requests import RouterMetrics
from router.requests.core import RequestCore
from router.workers.fleet import Fleet
from tandem.config.model import Role


class ModelServerCollector(Collector):
    """What waits and runs, and what was answered, is this router's own; the KV cache is that of all decode workers."""

    def __init__(self, core: RequestCore, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._core = core
        self._fleet = fleet
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        waiting, running = len(self._core.queue), len(self._core.placer)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the router's queue.", value=waiting)
        yield GaugeMetricFamily("vllm:num_requests_running", "The router's requests on workers.", value=running)
        used = total = 0
        for worker in self._fleet.workers():
            load = worker.link.load
            if worker.role is Role.DECODE and load is not None:
                used += load.blocks.in_use + load.blocks.leased
                total += load.blocks.total
        share = used / total if total else 0.0
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of decode workers' KV blocks in use.", value=share)
        yield from self._metrics.under_vllms_names()
