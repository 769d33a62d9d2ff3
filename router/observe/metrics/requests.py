"""Metrics of requests. Label values are bounded: served models, end states, error codes, placement reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from router.observe.metrics.handoffs import STAGE_SECONDS, HandoffMetrics
from router.observe.metrics.instruments import Counter, Gauge, Histogram
from router.observe.metrics.prefix_index import IndexCollector
from router.observe.metrics.queue import QueueCollector
from router.observe.slo import NO_ROOM, SloCollector, SloOutcome, slo_outcome
from router.observe.trace_store import Traces
from router.policies.types import PlacementReason
from router.prefix_index.follower import PrefixFollower
from router.prefix_index.mirror import PrefixMirror
from router.requests import actions as act
from router.requests.core import RequestCore
from router.requests.facts import Facts, Placed, Requeued, Waited
from router.requests.state_machine import RequestRun
from tandem.config.router import ClassSpec
from tandem.errors import ErrorCode, NotFound
from tandem.request import RequestState

UNKNOWN_MODEL = "unknown"

# How an accepted request may fail, and for what the cluster may refuse one: alerts watch them from the first.
_FAILURES = (
    ErrorCode.UNAVAILABLE,
    ErrorCode.WORKER_LOST,
    ErrorCode.WORKER_DIED,
    ErrorCode.GPU_LOST,
    ErrorCode.NO_WORKER,
    ErrorCode.KV_EXHAUSTED,
    ErrorCode.HANDOFF_FAILED,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.QUARANTINED,
    ErrorCode.INTERNAL,
    ErrorCode.REQUEST_FAILED,
)
_REFUSALS = sorted(NO_ROOM)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TTFT_STAGE_SECONDS = (*STAGE_SECONDS, 30.0, 60.0, 120.0, 300.0)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_VLLM_LABELS = {"model": "model_name"}


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, models: frozenset[str], *, is_enabled: bool = True) -> None:
        """Not enabled: observes no request, and has no exposition."""
        self._registry = registry
        self._is_enabled = is_enabled
        self._models = models
        self._requests = Counter(
            "tandem_requests", "Requests by end state and error code.", ("model", "state", "code"), registry=registry
        )
        self._requests.begin(sorted(models), (RequestState.FINISHED,), ("",))
        self._requests.begin(sorted(models), (RequestState.FAILED,), _FAILURES)
        self._requests.begin(sorted(models), (RequestState.REJECTED,), _REFUSALS)
        self._ttft = _histogram(registry, "tandem_ttft_seconds", "Time from receipt to first token.", _SECONDS)
        self._ttft_stages = Histogram(
            "tandem_ttft_stage_seconds",
            "Stages of the time to first token; they add up to tandem_ttft_seconds.",
            ("model", "stage"),
            buckets=_TTFT_STAGE_SECONDS,
            registry=registry,
        )
        self._tpot = _histogram(
            registry, "tandem_tpot_seconds", "Time per output token after the first.", _TOKEN_SECONDS
        )
        self._itl = _histogram(
            registry, "tandem_itl_seconds", "Time between two tokens of one answer, as they arrive.", _ITL_SECONDS
        )
        self._slo = Counter(
            "tandem_slo_requests",
            "Requests by outcome against the objectives of their class; goodput counts `met`.",
            ("model", "class", "outcome"),
            registry=registry,
        )
        self._classes: dict[str, ClassSpec] = {}
        self._traces: Traces
        self._queue = _histogram(registry, "tandem_queue_seconds", "Time from receipt to dispatch.", _SECONDS)
        self._handoff = _histogram(registry, "tandem_handoff_seconds", "Time from first token to joining.", _SECONDS)
        self._total = _histogram(registry, "tandem_e2e_seconds", "Time from receipt to finish.", _SECONDS)
        self._handoffs = HandoffMetrics(registry, models, self._label)
        self._tokens = Counter("tandem_tokens", "Tokens of finished requests.", ("model", "kind"), registry=registry)
        self._predicted = Counter(
            "tandem_prediction_tokens",
            "Tokens proposed from the predictions of finished requests, by whether the answer has them.",
            ("model", "outcome"),
            registry=registry,
        )
        self._placements = Counter("tandem_placements", "Placements by reason.", ("model", "reason"), registry=registry)
        self._placements.begin(sorted(models), PlacementReason)
        self._waits = Counter(
            "tandem_waits",
            "Requests that waited at the head of the queue, by reason.",
            ("model", "reason"),
            registry=registry,
        )
        self._credits = Counter(
            "tandem_index_credit_tokens",
            "Prompt tokens credited as cached by the prefix index; wrong: those that were not.",
            ("model", "kind"),
            registry=registry,
        )
        self._retries = Counter(
            "tandem_retries", "Requests put back into the queue.", ("model", "code"), registry=registry
        )
        self._moves = Counter(
            "tandem_moves", "Moves between decode workers by result.", ("model", "result"), registry=registry
        )
        self._workers = Gauge("tandem_workers", "Workers that can take requests.", ("role",), registry=registry)

    def watch_index(self, mirror: PrefixMirror, follower: PrefixFollower | None) -> None:
        """Reads the index at each scrape. `follower` None: the cluster has no Redis."""
        self._registry.register(IndexCollector(mirror, follower))

    def watch_core(self, core: RequestCore) -> None:
        """Reads its queue, its requests under way and its observers' failures at every scrape."""
        self._registry.register(QueueCollector(core))

    def watch_classes(self, classes: Sequence[ClassSpec]) -> None:
        """Sets the classes whose objectives `judged` uses."""
        self._classes = {each.name: each for each in classes}
        self._slo.begin(sorted(self._models), self._classes, SloOutcome)
        self._registry.register(SloCollector(classes))

    def render(self) -> bytes:
        """The exposition text. Raises NotFound when metrics are not enabled."""
        if not self._is_enabled:
            raise NotFound("metrics: observability.metrics.enabled is false in this cluster's configuration")
        return generate_latest(self._registry)

    def subscribe(self, facts: Facts, traces: Traces) -> None:
        name = "metrics"
        self._traces = traces
        if not self._is_enabled:
            return
        self._handoffs.subscribe(facts, traces)
        facts.subscribe(Placed, name, self._placed)
        facts.subscribe(Waited, name, self._waited)
        facts.subscribe(Requeued, name, self._requeued)
        facts.subscribe(act.FirstToken, name, self._first_token)
        facts.subscribe(act.TokenGaps, name, self._token_gaps)
        facts.subscribe(act.Moved, name, lambda run, fact, now_s: self._moved(run, "done"))
        facts.subscribe(act.MoveFailed, name, lambda run, fact, now_s: self._moved(run, "failed"))
        facts.subscribe(act.End, name, self._ended)

    def rejected(self, model: str, code: ErrorCode) -> None:
        """A request that was refused before it became one."""
        self._requests.labels(self._label(model), RequestState.REJECTED.value, code.value).inc()

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        label, priority = self._label(run.request.model), run.terms.priority
        code = None if fact.error is None else fact.error.code
        objectives = self._classes.get(priority)
        if objectives is not None and (outcome := slo_outcome(objectives, fact.final, fact.state, code)) is not None:
            self._slo.labels(label, priority, outcome.value).inc()
        self._requests.labels(label, fact.state.value, "" if code is None else code.value).inc()
        if (final := fact.final) is None:
            return
        line, usage = final.timeline, final.usage
        self._ttft.labels(label).observe(line.ttft_s)
        for span in self._traces.of(run).to_first_token():
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
        self._predicted.labels(label, "accepted").inc(usage.accepted_prediction_tokens)
        self._predicted.labels(label, "rejected").inc(usage.rejected_prediction_tokens)

    def _token_gaps(self, run: RequestRun, fact: act.TokenGaps, now_s: float) -> None:
        self._itl.labels(self._label(run.request.model)).observe_all(fact.gaps_s)

    def _placed(self, run: RequestRun, fact: Placed, now_s: float) -> None:
        self._placements.labels(self._label(run.request.model), fact.placement.reason.value).inc()

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        if fact.of_answer:
            label = self._label(run.request.model)
            self._credits.labels(label, "given").inc(run.credited_tokens)
            self._credits.labels(label, "wrong").inc(run.wrong_credit_tokens)

    def _waited(self, run: RequestRun, fact: Waited, now_s: float) -> None:
        self._waits.labels(self._label(run.request.model), fact.reason.value).inc()

    def _requeued(self, run: RequestRun, fact: Requeued, now_s: float) -> None:
        self._retries.labels(self._label(run.request.model), fact.cause.code.value).inc()

    def _moved(self, run: RequestRun, result: str) -> None:
        self._moves.labels(self._label(run.request.model), result).inc()

    def under_vllms_names(self) -> Iterator[Metric]:
        for family, name in (
            (self._ttft, "vllm:time_to_first_token_seconds"),
            (self._itl, "vllm:inter_token_latency_seconds"),
            (self._tpot, "vllm:request_time_per_output_token_seconds"),
            (self._queue, "vllm:request_queue_time_seconds"),
            (self._total, "vllm:e2e_request_latency_seconds"),
        ):
            yield family.renamed(name, _VLLM_LABELS)
        for kind, name in (
            ("prompt", "vllm:prompt_tokens"),
            ("completion", "vllm:generation_tokens"),
            ("prompt", "vllm:prefix_cache_queries"),
            ("cached", "vllm:prefix_cache_hits"),
        ):
            yield self._tokens.renamed(name, _VLLM_LABELS, kind=kind)

    def set_workers(self, *, prefill: int, decode: int) -> None:
        self._workers.labels("prefill").set(prefill)
        self._workers.labels("decode").set(decode)

    def _label(self, model: str) -> str:
        return model if model in self._models else UNKNOWN_MODEL


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(name, text, ("model",), buckets=buckets, registry=registry)
