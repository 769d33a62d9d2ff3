"""The router's Prometheus metrics. Labels are bounded: served models, end states, error codes, placement reasons."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from kvtransfer.causes import HandoffCause
from router.admission.admission import Admission
from router.observe.metrics.admission import AdmissionCollector
from router.observe.metrics.index import IndexCollector
from router.observe.metrics.labelled import Counter, Gauge, Histogram
from router.observe.slo import SloCollector, slo_outcome
from router.observe.trace import Attempt, Span, Stage, Trace, overlap_share, received_spans, sent_spans
from router.policies.types import PlacementReason, WaitReason
from router.prefix_index.follower import PrefixFollower
from router.prefix_index.mirror import PrefixMirror
from router.requests.output import Final
from tandem.config.spec import ClassSpec
from tandem.errors import ErrorCode
from tandem.request import RequestState
from tandem.v1 import worker_pb2

UNKNOWN_MODEL = "unknown"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TTFT_STAGE_SECONDS = (*_STAGE_SECONDS, 30.0, 60.0, 120.0, 300.0)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.97, 0.99, 1.0)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, models: frozenset[str]) -> None:
        self._registry = registry
        self._models = models
        self._requests = Counter(
            "tandem_requests", "Requests by end state and error code.", ("model", "state", "code"), registry=registry
        )
        self._ttft = _histogram(registry, "tandem_ttft_seconds", "Received to first token.", _SECONDS)
        self._ttft_stages = Histogram(
            "tandem_ttft_stage_seconds",
            "What the time to first token was made of: the stages add up to tandem_ttft_seconds.",
            ("model", "stage"),
            buckets=_TTFT_STAGE_SECONDS,
            registry=registry,
        )
        self._tpot = _histogram(
            registry, "tandem_tpot_seconds", "Time per output token after the first.", _TOKEN_SECONDS
        )
        self._itl = _histogram(
            registry, "tandem_itl_seconds", "Between two tokens of one answer, as they come.", _ITL_SECONDS
        )
        self._slo = Counter(
            "tandem_slo_requests",
            "Requests by whether they met the objectives of their class: goodput counts those that did.",
            ("model", "class", "outcome"),
            registry=registry,
        )
        self._classes: dict[str, ClassSpec] = {}
        self._queue = _histogram(registry, "tandem_queue_seconds", "Received to dispatched.", _SECONDS)
        self._handoff = _histogram(registry, "tandem_handoff_seconds", "First token to decode batch.", _SECONDS)
        self._total = _histogram(registry, "tandem_e2e_seconds", "Received to finished.", _SECONDS)
        self._stages = Histogram(
            "tandem_handoff_stage_seconds",
            "Stages of handoffs that joined (docs/observability.md).",
            ("model", "stage"),
            buckets=_STAGE_SECONDS,
            registry=registry,
        )
        self._handoff_bytes = Counter(
            "tandem_handoff_bytes", "KV bytes of handoffs that joined.", ("model",), registry=registry
        )
        self._handoff_pieces = Counter(
            "tandem_handoff_pieces", "Pieces of handoffs that joined.", ("model",), registry=registry
        )
        self._hidden_bytes = Counter(
            "tandem_handoff_hidden_bytes",
            "KV bytes that were acknowledged before the last layer was computed.",
            ("model",),
            registry=registry,
        )
        self._overlap = _histogram(
            registry, "tandem_handoff_overlap_share", "Hidden share of a handoff's bytes.", _SHARES
        )
        self._handoff_failures = Counter(
            "tandem_handoff_failures", "Attempts whose handoff failed.", ("model", "cause"), registry=registry
        )
        for model, cause in itertools.product(sorted(models), HandoffCause):
            self._handoff_failures.labels(model, cause.value)  # a series that begins at 1 shows no increase
        self._tokens = Counter("tandem_tokens", "Tokens of finished requests.", ("model", "kind"), registry=registry)
        self._placements = Counter(
            "tandem_placements", "Routing decisions by reason.", ("model", "reason"), registry=registry
        )
        self._waits = Counter(
            "tandem_waits",
            "Requests that had to wait at the head of the line, by reason.",
            ("model", "reason"),
            registry=registry,
        )
        self._credits = Counter(
            "tandem_index_credit_tokens",
            "Prompt tokens the prefix index said were cached; wrong: those that had to be computed after all.",
            ("model", "kind"),
            registry=registry,
        )
        self._retries = Counter("tandem_retries", "Requests put back in line.", ("model", "code"), registry=registry)
        self._moves = Counter(
            "tandem_moves", "Requests moved between decode workers, or not.", ("model", "result"), registry=registry
        )
        self._queued = Gauge("tandem_queued_requests", "Requests in the queue now.", registry=registry).labels()
        self._running = Gauge("tandem_running_requests", "Requests on workers now.", registry=registry).labels()
        self._workers = Gauge("tandem_workers", "Workers that can take requests.", ("role",), registry=registry)

    def watch_index(self, mirror: PrefixMirror, follower: PrefixFollower | None) -> None:
        """Reads the index at every scrape. No `follower`: the cluster has no Redis."""
        self._registry.register(IndexCollector(mirror, follower))

    def watch_admission(self, admission: Admission[Any]) -> None:
        """Reads it at every scrape."""
        self._registry.register(AdmissionCollector(admission))

    def watch_classes(self, classes: Sequence[ClassSpec]) -> None:
        """Their objectives are what requests are judged by."""
        self._classes = {each.name: each for each in classes}
        self._registry.register(SloCollector(classes))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def finished(self, model: str, final: Final, trace: Trace) -> None:
        label, line, usage = self._label(model), final.timeline, final.usage
        self.ended(model, RequestState.FINISHED, None)
        self._ttft.labels(label).observe(line.ttft_s)
        for span in trace.to_first_token():
            self._ttft_stages.labels(label, span.stage.value).observe(span.duration_s)
        self._queue.labels(label).observe(line.queue_s)
        self._total.labels(label).observe(line.total_s)
        if usage.completion_tokens > 1:
            self._tpot.labels(label).observe(line.decode_s / (usage.completion_tokens - 1))
        if line.prefill_worker:
            self._handoff.labels(label).observe(line.handoff_s)
        self._tokens.labels(label, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(label, "cached").inc(usage.cached_tokens)
        self._tokens.labels(label, "completion").inc(usage.completion_tokens)

    def judged(
        self, model: str, priority: str, final: Final | None, state: RequestState, code: ErrorCode | None
    ) -> None:
        """A request that was admitted, or refused by admission, ended. `final` None: not with a whole answer."""
        objectives = self._classes.get(priority)
        if objectives is not None and (outcome := slo_outcome(objectives, final, state, code)) is not None:
            self._slo.labels(self._label(model), priority, outcome.value).inc()

    def gaps(self, model: str, gaps_s: Sequence[float]) -> None:
        """Seconds between tokens of one answer."""
        self._itl.labels(self._label(model)).observe_all(gaps_s)

    def ended(self, model: str, state: RequestState, code: ErrorCode | None) -> None:
        self._requests.labels(self._label(model), state.value, "" if code is None else code.value).inc()

    def handed_off(self, model: str, attempt: Attempt, done: worker_pb2.HandoffDone) -> None:
        """A worker's report of its side."""
        label = self._label(model)
        spans: list[Span] = []
        if done.HasField("received"):
            self._handoff_bytes.labels(label).inc(done.bytes)
            self._handoff_pieces.labels(label).inc(done.pieces)
            reserve = attempt.reserve_span()
            spans = [*([reserve] if reserve else []), *received_spans(done)]
        elif (share := overlap_share(done)) is not None:
            self._hidden_bytes.labels(label).inc(done.sent.hidden_bytes)
            self._overlap.labels(label).observe(share)
            computed = (each for each in attempt.to_first_token() if each.stage in (Stage.DISPATCH, Stage.PREFILL))
            spans = [*sent_spans(done), *computed]
        for span in spans:
            self._stages.labels(label, span.stage.value).observe(span.duration_s)

    def handoff_failed(self, model: str, cause: HandoffCause) -> None:
        self._handoff_failures.labels(self._label(model), cause.value).inc()

    def rejected(self, model: str, code: ErrorCode) -> None:
        """A request that was refused before it became one."""
        self.ended(model, RequestState.REJECTED, code)

    def placed(self, model: str, reason: PlacementReason) -> None:
        self._placements.labels(self._label(model), reason.value).inc()

    def credited(self, model: str, tokens: int, wrong_tokens: int) -> None:
        """At the first token of a request."""
        self._credits.labels(self._label(model), "given").inc(tokens)
        self._credits.labels(self._label(model), "wrong").inc(wrong_tokens)

    def waited(self, model: str, reason: WaitReason) -> None:
        self._waits.labels(self._label(model), reason.value).inc()

    def retried(self, model: str, code: ErrorCode) -> None:
        self._retries.labels(self._label(model), code.value).inc()

    def moved(self, model: str, *, done: bool) -> None:
        self._moves.labels(self._label(model), "done" if done else "failed").inc()

    def set_load(self, *, queued: int, running: int) -> None:
        self._queued.set(queued)
        self._running.set(running)

    def set_workers(self, *, prefill: int, decode: int) -> None:
        self._workers.labels("prefill").set(prefill)
        self._workers.labels("decode").set(decode)

    def _label(self, model: str) -> str:
        return model if model in self._models else UNKNOWN_MODEL


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(name, text, ("model",), buckets=buckets, registry=registry)
