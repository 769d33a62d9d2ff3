"""The traces of active requests, written from the facts about them, and of those that ended last."""

from __future__ import annotations

import re
from collections import OrderedDict
from itertools import islice

from router.observe.trace import Attempt, Trace
from router.requests import actions as act
from router.requests.facts import Arrived, Facts
from router.requests.state_machine import RequestRun
from router.workers.fleet import Fleet
from tandem.errors import NotFound
from tandem.request import RequestState
from tandem.v1 import worker_pb2

MAX_TRACES = 1000
DEFAULT_LISTED = 20
_ANSWER_ID = re.compile(r"^(chatcmpl-|cmpl-|resp_)")


class TraceStore:
    """The last requests that ended, by id and by client id."""

    def __init__(self, limit: int = MAX_TRACES) -> None:
        self._limit = limit
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._by_client: dict[str, Trace] = {}  # the latest with that id

    def add(self, trace: Trace) -> None:
        """Stores a trace. Skips rejected requests without an attempt: a flood of them would evict the others."""
        if trace.state is RequestState.REJECTED and not trace.attempts:
            return
        self._traces[trace.request_id] = trace
        if trace.client_id:
            self._by_client[trace.client_id] = trace
        while len(self._traces) > self._limit:
            _, oldest = self._traces.popitem(last=False)
            if self._by_client.get(oldest.client_id) is oldest:
                del self._by_client[oldest.client_id]

    def find(self, request_id: str) -> Trace | None:
        """By the router's own id."""
        return self._traces.get(request_id)

    def get(self, request_id: str) -> Trace:
        """Finds a trace by request id, by OpenAI answer id (`chatcmpl-…`, `cmpl-…`, `resp_…`; the first of several
        answers), or by the client's `x-request-id`. Raises NotFound."""
        bare = _ANSWER_ID.sub("", request_id)
        trace = self._traces.get(bare) or self._traces.get(f"{bare}-0") or self._by_client.get(request_id)
        if trace is None:
            raise NotFound(
                f"request_id: {request_id[:80]!r} is not among the last {self._limit} requests that ended here; "
                "`tandem trace` lists the latest ones",
                field="request_id",
            )
        return trace

    def latest(self, number: int) -> list[Trace]:
        """The latest traces, newest first."""
        return list(islice(reversed(self._traces.values()), number or DEFAULT_LISTED))


class Traces:
    """Traces every active request and adds it to `store` at the end. It subscribes first: other observers read its
    traces."""

    def __init__(self, fleet: Fleet) -> None:
        self.store = TraceStore()
        self._fleet = fleet
        self._live: dict[RequestRun, Trace] = {}

    def subscribe(self, facts: Facts) -> None:
        name = "traces"
        facts.subscribe(Arrived, name, self._arrived)
        facts.subscribe(act.AttemptStarted, name, self._started)
        facts.subscribe(act.PrefillSent, name, self._prefill_sent)
        facts.subscribe(act.FirstToken, name, self._first_token)
        facts.subscribe(act.HandoffSeen, name, self._handoff_seen)
        facts.subscribe(act.Joined, name, self._joined)
        facts.subscribe(act.AttemptFailed, name, self._attempt_failed)
        facts.subscribe(act.End, name, self._ended)

    def subscribe_last(self, facts: Facts) -> None:
        """Call this after all observers that read a trace at the request's end have subscribed."""
        facts.subscribe(act.End, "traces", self._store)

    def of(self, run: RequestRun) -> Trace:
        """The trace of an active or recently ended request. Raises NotFound."""
        return self._live.get(run) or self.store.get(run.request.request_id)

    def reported(self, run: RequestRun, wire_id: str) -> Attempt | None:
        """The attempt that a worker's report is about. None: the request ended too long ago."""
        trace = self._live.get(run) or self.store.find(run.request.request_id)
        return None if trace is None else trace.attempt(wire_id)

    def _arrived(self, run: RequestRun, fact: Arrived, now_s: float) -> None:
        self._live[run] = Trace.of(run.request, run.terms, run.received_s)

    def _started(self, run: RequestRun, fact: act.AttemptStarted, now_s: float) -> None:
        prefill = "" if fact.prefill is None else fact.prefill.worker_id
        self._live[run].begin(fact.wire_id, prefill, fact.decode.worker_id, now_s)

    def _prefill_sent(self, run: RequestRun, fact: act.PrefillSent, now_s: float) -> None:
        if (last := self._live[run].last) is not None:
            last.reserved_s = last.prefill_sent_s = now_s

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        last, link = self._live[run].last, self._fleet.link(fact.worker)
        if last is None:
            return
        last.first_token_s = now_s
        token = fact.token
        if link is not None and isinstance(token, worker_pb2.StepToken) and token.HasField("computing_at_s"):
            last.computing_s = link.local_s(token.computing_at_s)
            last.sampled_s = link.local_s(token.sampled_at_s)

    def _handoff_seen(self, run: RequestRun, fact: act.HandoffSeen, now_s: float) -> None:
        trace = self._live.get(run) or self.store.find(run.request.request_id)
        if trace is not None and isinstance(fact.report, worker_pb2.HandoffDone):
            trace.report(fact.report, fact.anchor_s)

    def _joined(self, run: RequestRun, fact: act.Joined, now_s: float) -> None:
        if (last := self._live[run].last) is not None:
            last.joined_s = fact.at_s

    def _attempt_failed(self, run: RequestRun, fact: act.AttemptFailed, now_s: float) -> None:
        self._live[run].failed(fact.error, now_s)

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        trace = self._live[run]
        trace.cached_tokens_prefill, trace.cached_tokens_decode = fact.cached_prefill_tokens, fact.cached_decode_tokens
        if fact.error is not None:
            trace.failed(fact.error, now_s)
        trace.end(fact.state, None if fact.error is None else fact.error.code, fact.usage, now_s)

    def _store(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        self.store.add(self._live.pop(run))
