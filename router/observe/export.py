"""Exports the traces of sampled requests to a collector, in its own thread. The event loop only queues them.

The queue is bounded. Traces that find no room, or that the collector refuses, are counted and dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING

from router.observe.span_tree import span_tree
from router.observe.trace import Trace
from router.observe.trace_store import Traces
from router.requests import actions as act
from router.requests.facts import Facts
from tandem.config.observability import TracingSpec

if TYPE_CHECKING:
    from tandem.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

MAX_QUEUED = 2048
BATCH_TRACES = 64
EVERY_S = 1.0
HOLD_S = 0.5  # the prefill worker's report may come after the request's end
CLOSE_S = 1.0


class ExportOutcome(StrEnum):
    """What became of the trace of a sampled request; a metric label."""

    EXPORTED = "exported"
    DROPPED = "dropped"  # no room in the queue
    FAILED = "failed"  # the collector was away or refused it


class TraceExport:
    """Call `offer` on the event loop; the thread does the rest."""

    def __init__(self, tracing: Tracing, router_id: str) -> None:
        self.outcomes: Counter[ExportOutcome] = Counter()
        self._tracing = tracing
        self._router_id = router_id
        self._queue: deque[tuple[float, Trace]] = deque()
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="trace-export", daemon=True)

    @classmethod
    def of(cls, spec: TracingSpec, cluster: str, router_id: str) -> TraceExport | None:
        """None without an endpoint; then OpenTelemetry is not imported. Raises ConfigError."""
        if spec.otlp_endpoint is None:
            return None
        tracing: Tracing = import_module("tandem.telemetry.tracing").Tracing(spec, cluster)
        return cls(tracing, router_id)

    def start(self) -> None:
        self._thread.start()

    def subscribe(self, facts: Facts, traces: Traces) -> None:
        """Offers the trace of every request that ends."""
        facts.subscribe(act.End, "trace_export", lambda run, end, now_s: self.offer(traces.of(run)))

    def offer(self, trace: Trace) -> None:
        """Queues the trace of a request that ended, if sampled. Never blocks."""
        if trace.context is None or not trace.context.sampled:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.outcomes[ExportOutcome.DROPPED] += 1
            return
        self._queue.append((time.monotonic() + HOLD_S, trace))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Sends the queued traces; waits at most `timeout_s`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(EVERY_S)
            while batch := self._due(stopping):
                self._send(batch)
        self._tracing.close()

    def _due(self, everything: bool) -> list[Trace]:
        now_s = time.monotonic()
        batch: list[Trace] = []
        while self._queue and len(batch) < BATCH_TRACES and (everything or self._queue[0][0] <= now_s):
            batch.append(self._queue.popleft()[1])
        return batch

    def _send(self, batch: list[Trace]) -> None:
        try:
            for trace in batch:
                if trace.context is not None:
                    self._tracing.add(span_tree(trace, self._router_id), trace.context)
            sent = self._tracing.export()
        except Exception:  # a fault of tracing must not end the thread; this batch is lost
            log.exception("failed to export traces")
            sent = False
        self.outcomes[ExportOutcome.EXPORTED if sent else ExportOutcome.FAILED] += len(batch)
        if sent == self._failing:
            self._failing = not sent
            if sent:
                log.info("the trace collector accepts traces again")
            else:
                log.warning("the trace collector does not accept traces; dropping them")
