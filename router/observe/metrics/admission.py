"""Metrics of admission, read at each scrape. Labels are configured classes, never tenants: clients name tenants."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.admission.admission import Admission


class AdmissionCollector(Collector):
    def __init__(self, admission: Admission[object]) -> None:
        self._admission = admission

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        queued = GaugeMetricFamily("tandem_class_queued_requests", "Requests in the queue now.", labels=["class"])
        for name, count in self._admission.queued_by_class().items():
            queued.add_metric([name], count)
        yield queued
        refused = CounterMetricFamily(
            "tandem_admission_refusals", "Requests that admission refused.", labels=["class", "reason"]
        )
        for (name, refusal), count in self._admission.refusals.items():
            refused.add_metric([name, refusal.value], count)
        yield refused
        rates = GaugeMetricFamily(
            "tandem_drain_tokens_per_second",
            "Prompt tokens per second that a pool prefills while requests wait.",
            labels=["model"],
        )
        for model, rate in self._admission.rates().items():
            rates.add_metric([model], rate)
        yield rates
