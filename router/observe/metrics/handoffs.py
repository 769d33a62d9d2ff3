"""Metrics of handoffs, from the workers' reports."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvtransfer.causes import HandoffCause, HandoffFault
from router.observe.metrics.instruments import Counter, Histogram
from router.observe.trace import Span, Stage, overlap_share, received_spans, sent_spans
from router.observe.trace_store import Traces
from router.requests import actions as act
from router.requests.facts import Facts
from router.requests.state_machine import RequestRun
from tandem.v1 import worker_pb2

STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.97, 0.99, 1.0)


class HandoffMetrics:
    def __init__(self, registry: CollectorRegistry, models: frozenset[str], label: Callable[[str], str]) -> None:
        """`label`: of a model's name."""
        self._label = label
        self._traces: Traces
        self._stages = Histogram(
            "tandem_handoff_stage_seconds",
            "Stages of handoffs that joined (docs/observability.md).",
            ("model", "stage"),
            buckets=STAGE_SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "tandem_handoff_bytes", "KV bytes of handoffs that joined.", ("model",), registry=registry
        )
        self._pieces = Counter(
            "tandem_handoff_pieces", "Pieces of handoffs that joined.", ("model",), registry=registry
        )
        self._hidden_bytes = Counter(
            "tandem_handoff_hidden_bytes",
            "KV bytes acknowledged before the last layer was computed.",
            ("model",),
            registry=registry,
        )
        self._overlap = Histogram(
            "tandem_handoff_overlap_share",
            "Hidden share of a handoff's bytes.",
            ("model",),
            buckets=_SHARES,
            registry=registry,
        )
        self._failures = Counter(
            "tandem_handoff_failures", "Attempts whose handoff failed.", ("model", "cause"), registry=registry
        )
        self._failures.begin(sorted(models), HandoffCause)

    def subscribe(self, facts: Facts, traces: Traces) -> None:
        self._traces = traces
        facts.subscribe(act.HandoffSeen, "metrics", self._seen)
        facts.subscribe(act.HandoffFailed, "metrics", self._failed)

    def _seen(self, run: RequestRun, fact: act.HandoffSeen, now_s: float) -> None:
        """A worker's report of its side."""
        label, done = self._label(run.request.model), fact.report
        attempt = self._traces.reported(run, fact.wire_id)
        if attempt is None or not isinstance(done, worker_pb2.HandoffDone):
            return
        spans: list[Span] = []
        if done.HasField("received"):
            self._bytes.labels(label).inc(done.bytes)
            self._pieces.labels(label).inc(done.pieces)
            reserve = attempt.reserve_span()
            spans = [*([reserve] if reserve else []), *received_spans(done)]
        elif (share := overlap_share(done)) is not None:
            self._hidden_bytes.labels(label).inc(done.sent.hidden_bytes)
            self._overlap.labels(label).observe(share)
            computed = (each for each in attempt.to_first_token() if each.stage in (Stage.DISPATCH, Stage.PREFILL))
            spans = [*sent_spans(done), *computed]
        for span in spans:
            self._stages.labels(label, span.stage.value).observe(span.duration_s)

    def _failed(self, run: RequestRun, fact: act.HandoffFailed, now_s: float) -> None:
        if isinstance(fact.error, HandoffFault):
            self._failures.labels(self._label(run.request.model), fact.error.cause.value).inc()
