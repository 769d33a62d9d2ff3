"""What came of requests with an idempotency key, and the metric that counts it."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry

from router.observe.metrics.instruments import Counter


class Outcome(StrEnum):
    """Of one request with a key; a metric label."""

    RUN = "run"  # the first with its key
    ATTACHED = "attached"  # it follows the one under way
    REPLAYED = "replayed"  # it gets a done answer
    CONFLICT = "conflict"  # the key is another request's
    NOT_KEPT = "not_kept"
    UNDER_WAY = "under_way"  # at another router, for too long


class Api(StrEnum):
    """A metric label."""

    HTTP = "http"
    GRPC = "grpc"


class KeyedMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "tandem_keyed_requests",
            "Requests with an idempotency key by outcome.",
            ("api", "outcome"),
            registry=registry,
        )
        self._requests.begin(Api, Outcome)

    def count(self, api: Api, outcome: Outcome) -> None:
        self._requests.labels(api.value, outcome.value).inc()
