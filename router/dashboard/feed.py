"""The dashboard's observer. Every fact costs O(1) in bounded memory; `router.dashboard.view` computes views on demand.
Holds ids and numbers, never prompt text."""

from __future__ import annotations

import time
from collections import Counter, deque

import msgspec

from kvtransfer.causes import HandoffFault
from router.dashboard.events import EventKind, EventLog, FleetWatch, Severity
from router.dashboard.flows import Flows
from router.dashboard.time_slices import Count, Latency, TimeSlices
from router.policies.types import PlacementReason
from router.requests import actions as act
from router.requests.facts import Facts, Placed, Requeued
from router.requests.state_machine import RequestRun
from tandem.clock import Clock
from tandem.v1 import worker_pb2

MAX_DECISIONS = 50


class Decision(msgspec.Struct, frozen=True):
    """The placement of one request, with its reason."""

    at_unix_s: float
    request_id: str
    reason: PlacementReason
    prefill_worker: str | None  # None: prefilled on the decode worker
    decode_worker: str
    prompt_tokens: int
    cached_tokens: int  # on the worker that prefills, by the prefix index


class Feed:
    def __init__(self, clock: Clock) -> None:
        self.slices = TimeSlices()
        self.flows = Flows()
        self.events = EventLog()
        self.fleet_watch = FleetWatch(self.events)
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self.placements: Counter[PlacementReason] = Counter()
        self.started_s = clock.now_s()
        self._clock = clock

    def subscribe(self, facts: Facts) -> None:
        name = "dashboard"
        facts.subscribe(Placed, name, self._placed)
        facts.subscribe(act.FirstToken, name, self._first_token)
        facts.subscribe(act.TokenGaps, name, self._token_gaps)
        facts.subscribe(act.HandoffSeen, name, self._handoff_seen)
        facts.subscribe(act.HandoffFailed, name, self._handoff_failed)
        facts.subscribe(Requeued, name, self._requeued)
        facts.subscribe(act.End, name, self._ended)

    def _placed(self, run: RequestRun, fact: Placed, now_s: float) -> None:
        placement = fact.placement
        self.placements[placement.reason] += 1
        decision = Decision(
            at_unix_s=time.time(),
            request_id=run.request.request_id,
            reason=placement.reason,
            prefill_worker=None if placement.prefill is None else placement.prefill.worker_id,
            decode_worker=placement.decode.worker_id,
            prompt_tokens=run.prefill_tokens,
            cached_tokens=placement.prefiller.cached_tokens,
        )
        self.decisions.append(decision)

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        if not fact.of_answer:
            return
        self.slices.observe(Latency.TTFT, now_s - run.received_s, now_s)
        for count, number in (
            (Count.PROMPT_TOKENS, run.request.prompt_tokens),
            (Count.CACHED_TOKENS, run.cached_tokens),
            (Count.CREDITED_TOKENS, run.credited_tokens),
            (Count.WRONG_CREDIT_TOKENS, run.wrong_credit_tokens),
            (Count.OUTPUT_TOKENS, 1),
        ):
            self.slices.add(count, number, now_s)

    def _token_gaps(self, run: RequestRun, fact: act.TokenGaps, now_s: float) -> None:
        self.slices.observe_all(Latency.ITL, fact.gaps_s, fact.last_token_s)
        self.slices.add(Count.OUTPUT_TOKENS, len(fact.gaps_s), fact.last_token_s)

    def _handoff_seen(self, run: RequestRun, fact: act.HandoffSeen, now_s: float) -> None:
        """Counts only the decode worker's report: the prefill worker reports the same bytes."""
        done = fact.report
        if not isinstance(done, worker_pb2.HandoffDone) or not done.HasField("received"):
            return
        self.slices.add(Count.HANDOFFS, 1, now_s)
        self.slices.add(Count.HANDOFF_BYTES, done.bytes, now_s)
        if run.prefill is not None and run.decode is not None:
            self.flows.handed_off((run.prefill.worker_id, run.decode.worker_id), done.bytes, now_s)

    def _handoff_failed(self, run: RequestRun, fact: act.HandoffFailed, now_s: float) -> None:
        if run.prefill is None or run.decode is None or not isinstance(fact.error, HandoffFault):
            return
        pair = run.prefill.worker_id, run.decode.worker_id
        self.flows.failed(pair)
        cause = fact.error.cause.value.replace("_", " ")
        self.events.note(EventKind.HANDOFF_FAILED, Severity.BAD, " → ".join(pair), cause)

    def _requeued(self, run: RequestRun, fact: Requeued, now_s: float) -> None:
        if not fact.refused:
            worker = "" if run.decode is None else run.decode.worker_id
            text = f"requests requeued: {fact.cause.code.value.replace('_', ' ')}"
            self.events.note(EventKind.MIGRATION, Severity.WARNING, worker, text)

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        final = fact.final
        self.slices.add(Count.NOT_FINISHED if final is None else Count.FINISHED, 1, now_s)
        if final is not None:
            self.slices.observe(Latency.E2E, final.timeline.total_s, now_s)
            if final.usage.completion_tokens > 1:
                tpot_s = final.timeline.decode_s / (final.usage.completion_tokens - 1)
                self.slices.observe(Latency.TPOT, tpot_s, now_s)

    def readiness(self, router_id: str, *, is_ready: bool) -> None:
        severity = Severity.GOOD if is_ready else Severity.BAD
        self.events.note(EventKind.ROUTER, severity, router_id, "ready" if is_ready else "not ready")
