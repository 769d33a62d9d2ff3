"""Builds the dashboard's snapshot of one router, and timelines of requests, on demand."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from router.dashboard import cluster_status, figures, snapshot
from router.dashboard.events import DashboardEvent
from router.dashboard.feed import Decision, Feed
from router.observe.trace import Trace
from router.observe.trace_store import Traces
from router.prefix_index.follower import PrefixFollower
from router.prefix_index.mirror import PrefixMirror
from router.requests.dispatcher import Dispatcher
from router.requests.output import Usage
from router.requests.state_machine import RequestRun
from router.service import RouterService
from router.workers.fleet import Worker
from tandem.clock import Clock
from tandem.config.model import Role
from tandem.config.router import ClassSpec
from tandem.request import RequestState
from tandem.v1 import trace_pb2
from tandem.version import tandem_version

LISTED_REQUESTS = 60  # in flight, and as many that ended
_HANDING_OFF = (RequestState.PREFILLING, RequestState.HANDOFF)


class RouterView:
    """Reads the router's state and changes nothing."""

    def __init__(
        self,
        *,
        service: RouterService,
        dispatcher: Dispatcher,
        mirror: PrefixMirror,
        follower: PrefixFollower | None,
        traces: Traces,
        feed: Feed,
        classes: Sequence[ClassSpec],
        clock: Clock,
    ) -> None:
        self._service = service
        self._dispatcher = dispatcher
        self._mirror = mirror
        self._follower = follower
        self._traces = traces
        self._feed = feed
        self._classes = classes
        self._clock = clock

    def take(self) -> snapshot.Snapshot:
        now_s, now_unix_s = self._clock.now_s(), time.time()
        slices, dispatcher = self._feed.slices, self._dispatcher
        up_s = now_s - self._feed.started_s
        workers = [self._worker(each) for each in dispatcher.fleet.workers()]
        events = [_event(each) for each in self._feed.events.latest()]
        is_ready = self._service.ready
        return snapshot.Snapshot(
            version=snapshot.VERSION,
            tandem=tandem_version(),
            cluster=self._service.cluster,
            router_id=self._service.router_id,
            taken_unix_s=now_unix_s,
            up_s=up_s,
            ready=is_ready,
            models=list(self._service.models.by_name),
            controller=False,
            routers=[snapshot.RouterRow(self._service.router_id, "ready" if is_ready else "not_ready")],
            workers=workers,
            flows=list(self._flows(now_s)),
            queues=self._queues(),
            queued_requests=len(dispatcher.queue),
            running_requests=len(dispatcher.running()),
            rates=figures.rates(slices, up_s, now_s),
            latency=figures.summaries(slices, now_s),
            history=figures.history(slices, now_s, now_unix_s),
            cache=self._cache(now_s),
            scaling=cluster_status.scaling(workers),
            placements={reason.value: count for reason, count in self._feed.placements.items()},
            decisions=[_decision(each) for each in reversed(self._feed.decisions)],
            events=events,
            requests=list(self._requests(now_s)),
        )

    def request_timeline(self, request_id: str) -> snapshot.RequestTimeline:
        """The timeline of a request in flight or recently ended. Raises NotFound."""
        now_s = self._clock.now_s()
        for run in (*self._dispatcher.running(), *self._dispatcher.waiting()):
            if run.request.request_id == request_id:
                return _timeline(self._traces.of(run), self._running_row(run, now_s))
        trace = self._traces.store.get(request_id)
        return _timeline(trace, _ended_row(trace, now_s))

    def _worker(self, worker: Worker) -> snapshot.WorkerRow:
        info, load = worker.link.info, worker.link.load
        pace, meters = worker.estimates.pace(), worker.link.meters
        now_s = time.monotonic()  # the clock of the links
        is_prefill = worker.role is Role.PREFILL
        state = "ready" if worker.link.ready else "link_lost"
        seen = snapshot.WorkerRow(
            worker_id=info.worker_id,
            role=worker.role.value,
            model=info.model,
            epoch=str(info.epoch),
            tp=info.layout.tp,
            state=state if worker.listed else "leaving",
            health=self._dispatcher.fleet.health.state(worker.key).value,
            blocks=snapshot.Blocks(total=info.total_blocks),
            prefill_tokens_per_s=1 / pace.prefill_s_per_token if is_prefill else None,
            tpot_s=None if is_prefill else pace.tpot_at_s(worker.running_requests),
            mfu=meters.mfu(now_s),
            mbu=meters.mbu(now_s),
            ridge=meters.ridge,
        )
        return seen if load is None else cluster_status.with_load(seen, load)

    def _flows(self, now_s: float) -> Iterator[snapshot.FlowRow]:
        in_flight = Counter(
            (run.prefill.worker_id, run.decode.worker_id)
            for run in self._dispatcher.running()
            if run.prefill is not None and run.decode is not None and run.lifecycle.state in _HANDING_OFF
        )
        known = dict(self._feed.flows.items())
        for pair in [*known, *(pair for pair in in_flight if pair not in known)]:
            flow = known.get(pair)
            if flow is None:
                yield snapshot.FlowRow(*pair, in_flight=in_flight[pair])
                continue
            yield snapshot.FlowRow(
                *pair,
                bytes_per_s=flow.bytes_per_s(now_s),
                handoffs_per_s=flow.handoffs_per_s(now_s),
                in_flight=in_flight[pair],
                handoffs=flow.handoffs,
                bytes=flow.bytes,
                failures=flow.failures,
            )

    def _queues(self) -> list[snapshot.QueueRow]:
        queue = self._dispatcher.queue
        queued, refusals = queue.queued_by_class(), queue.refusals
        return [
            snapshot.QueueRow(
                name=each.name,
                queued=queued[each.name],
                is_batch=each.batch,
                ttft_slo_s=each.ttft_slo_s,
                refusals={why.value: count for (name, why), count in refusals.items() if name == each.name},
            )
            for each in self._classes
        ]

    def _cache(self, now_s: float) -> snapshot.Cache:
        slices, follower = self._feed.slices, self._follower
        redis = "none"
        if follower is not None:
            redis = "up" if follower.connected else "down"
        return snapshot.Cache(
            hit_share=figures.hit_share(slices, now_s),
            wrong_credit_share=figures.wrong_credit_share(slices, now_s),
            window_s=figures.CACHE_WINDOW_S,
            hit_share_history=figures.hit_share_history(slices, now_s),
            index_blocks=len(self._mirror),
            index_workers=len(self._mirror.workers()),
            lost_blocks=self._mirror.lost_blocks,
            redis=redis,
        )

    def _requests(self, now_s: float) -> Iterator[snapshot.RequestRow]:
        in_flight = [*self._dispatcher.running(), *self._dispatcher.waiting()]
        in_flight.sort(key=lambda run: run.received_s, reverse=True)
        if len(in_flight) > LISTED_REQUESTS:  # the oldest may be stuck
            half = LISTED_REQUESTS // 2
            in_flight = in_flight[:half] + in_flight[-half:]
        for run in in_flight:
            yield self._running_row(run, now_s)
        for trace in self._traces.store.latest(LISTED_REQUESTS):
            yield _ended_row(trace, now_s)

    def _running_row(self, run: RequestRun, now_s: float) -> snapshot.RequestRow:
        cached_tokens = run.cached_tokens if run.answer_tokens else 0
        return _request_row(self._traces.of(run), run.state.value, cached_tokens, run.answer_tokens, now_s)


def _ended_row(trace: Trace, now_s: float) -> snapshot.RequestRow:
    usage = trace.usage or Usage(trace.prompt_tokens, 0, 0)
    return _request_row(trace, trace.state.value, usage.cached_tokens, usage.completion_tokens, now_s)


def _timeline(trace: Trace, row: snapshot.RequestRow) -> snapshot.RequestTimeline:
    return snapshot.RequestTimeline(snapshot.VERSION, row, _attempts(trace.to_wire()))


def _request_row(
    trace: Trace, state: str, cached_tokens: int, completion_tokens: int, now_s: float
) -> snapshot.RequestRow:
    last = trace.last
    first_tokens = [each.first_token_s for each in trace.attempts if each.first_token_s is not None]
    received = None if last is None or last.received is None else last.received.done
    return snapshot.RequestRow(
        request_id=trace.request_id,
        model=trace.model,
        state=state,
        error="" if trace.error is None else trace.error.value,
        received_unix_s=trace.received_unix_s,
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
        ttft_s=first_tokens[0] - trace.received_s if first_tokens else None,
        total_s=(now_s if trace.ended_s is None else trace.ended_s) - trace.received_s,
        attempts=len(trace.attempts),
        prefill_worker="" if last is None else last.prefill_worker,
        decode_worker="" if last is None else last.decode_worker,
        handoff_bytes=0 if received is None else received.bytes,
    )


def _attempts(wire: trace_pb2.RequestTrace) -> list[snapshot.AttemptRow]:
    return [_attempt(each) for each in wire.attempts]


def _attempt(wire: trace_pb2.Attempt) -> snapshot.AttemptRow:
    return snapshot.AttemptRow(
        prefill_worker=wire.prefill_worker,
        decode_worker=wire.decode_worker,
        spans=[snapshot.SpanRow(span.stage, span.start_s, span.end_s) for span in wire.spans],
        bytes=wire.bytes,
        blocks=wire.blocks,
        pieces=wire.pieces,
        overlap_share=wire.overlap_share if wire.HasField("overlap_share") else None,
        exposed_s=wire.exposed_s if wire.HasField("exposed_s") else None,
        error=wire.error,
        cause=wire.cause,
        message=wire.message,
    )


def _event(event: DashboardEvent) -> snapshot.EventRow:
    return snapshot.EventRow(
        event.kind, event.severity, event.subject, event.text, event.first_unix_s, event.last_unix_s, event.times
    )


def _decision(decision: Decision) -> snapshot.PlacementRow:
    return snapshot.PlacementRow(
        at_unix_s=decision.at_unix_s,
        request_id=decision.request_id,
        reason=decision.reason.value,
        prefill_worker=decision.prefill_worker,
        decode_worker=decision.decode_worker,
        prompt_tokens=decision.prompt_tokens,
        cached_tokens=decision.cached_tokens,
    )
