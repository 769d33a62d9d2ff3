"""Metrics of worker health and canaries. All labels are enums."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.observe.metrics.instruments import Counter
from router.workers.health import EjectReason, HealthBoard, HealthState
from tandem.config.model import Role


class CanaryResult(StrEnum):
    """A metric label."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"  # no room: says nothing about the worker


class CanaryPurpose(StrEnum):
    """A metric label."""

    WORKER = "worker"  # tests one worker that is suspect or in probation
    READINESS = "readiness"  # tests whether the cluster serves a model


class HealthMetrics(Collector):
    """Reads the board at every scrape."""

    def __init__(self, registry: CollectorRegistry, board: HealthBoard) -> None:
        self._board = board
        self._canaries = Counter(
            "tandem_canaries", "Canaries by purpose and result.", ("purpose", "result"), registry=registry
        )
        self._canaries.begin(CanaryPurpose, CanaryResult)
        registry.register(self)

    def canary(self, purpose: CanaryPurpose, result: CanaryResult) -> None:
        self._canaries.labels(purpose.value, result.value).inc()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        counts, ejected = self._board.counts(), self._board.ejected
        health = GaugeMetricFamily("tandem_worker_health", "Linked workers by health state.", labels=("role", "state"))
        ejections = CounterMetricFamily(
            "tandem_ejections", "Ejections of workers by reason.", labels=("role", "reason")
        )
        for role in Role:
            for state in HealthState:
                health.add_metric((role.value, state.value), counts[role, state])
            for reason in EjectReason:
                ejections.add_metric((role.value, reason.value), ejected[role, reason])
        yield health
        yield ejections
