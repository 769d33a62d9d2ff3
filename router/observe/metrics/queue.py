"""The queue and the running requests as Prometheus metrics, read at a scrape. Classes are labels, tenants never are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.admission.request_queue import Refusal
from router.requests.core import RequestCore


class QueueCollector(Collector):
    def __init__(self, core: RequestCore) -> None:
        self._core = core
        self._queue = core.queue

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield GaugeMetricFamily("tandem_queued_requests", "Requests in the queue now.", value=len(self._queue))
        yield GaugeMetricFamily("tandem_running_requests", "Requests on workers now.", value=len(self._core.placer))
        failures = CounterMetricFamily(
            "tandem_observer_failures", "Facts that an observer of requests failed on.", labels=["observer"]
        )
        for observer, count in self._core.facts.failures.items():
            failures.add_metric([observer], count)
        if self._core.unrecorded:
            failures.add_metric(["recorder"], self._core.unrecorded)
        yield failures
        queued = GaugeMetricFamily("tandem_class_queued_requests", "Requests in the queue now.", labels=["class"])
        for name, count in self._queue.queued_by_class().items():
            queued.add_metric([name], count)
        yield queued
        refused = CounterMetricFamily(
            "tandem_admission_refusals", "Requests that admission refused.", labels=["class", "reason"]
        )
        for name, refusal in itertools.product(self._queue.queued_by_class(), Refusal):  # from 0: alerts rate() them
            refused.add_metric([name, refusal.value], self._queue.refusals[name, refusal])
        yield refused
        rates = GaugeMetricFamily(
            "tandem_drain_tokens_per_second",
            "Prompt tokens per second that a pool prefills while requests wait.",
            labels=["model"],
        )
        for model, rate in self._queue.rates().items():
            rates.add_metric([model], rate)
        yield rates
