"""What the dispatcher tells the dashboard while it works. Every call costs O(1) and keeps bounded memory; what a viewer
sees is worked out when somebody looks (router.dashboard.view). Never prompt text, only ids and numbers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.causes import HandoffFault
from router.dashboard.events import EventKind, EventLog, FleetWatch, Severity
from router.dashboard.flows import Flows
from router.dashboard.slices import Count, Latency, Slices, bucket_of
from router.observe.trace import Attempt
from router.policies.types import Placement, PlacementReason
from tandem.clock import Clock
from tandem.errors import TandemError
from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.requests.run import RequestRun

MAX_DECISIONS = 50
_ITL, _OUTPUT_TOKENS = int(Latency.ITL), int(Count.OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where one request went, and why."""

    at_unix_s: float
    request_id: str
    reason: PlacementReason
    prefill_worker: str | None  # None: prefilled on the decode worker
    decode_worker: str
    prompt_tokens: int
    cached_tokens: int  # by the prefix index, on whoever prefills


class Feed:
    def __init__(self, clock: Clock) -> None:
        self.slices = Slices()
        self.flows = Flows()
        self.events = EventLog()
        self.fleet_watch = FleetWatch(self.events)
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self.placements: Counter[PlacementReason] = Counter()
        self.started_s = clock.now_s()
        self._clock = clock

    def placed(self, run: RequestRun, placement: Placement) -> None:
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

    def first_token(self, run: RequestRun) -> None:
        """Of an answer, not of its continuation elsewhere."""
        now_s = self._clock.now_s()
        self.slices.observe(Latency.TTFT, now_s - run.received_s, now_s)
        for count, number in (
            (Count.PROMPT_TOKENS, run.request.prompt_tokens),
            (Count.CACHED_TOKENS, run.cached_tokens),
            (Count.CREDITED_TOKENS, run.credited_tokens),
            (Count.WRONG_CREDIT_TOKENS, run.wrong_credit_tokens),
            (Count.OUTPUT_TOKENS, 1),
        ):
            self.slices.add(count, number, now_s)

    def next_tokens(self, gaps_s: Sequence[float], now_s: float) -> None:
        """Tokens of one answer came, each so long after the one before it."""
        now = self.slices.at(now_s)
        buckets = now.buckets[_ITL]
        for gap_s in gaps_s:
            buckets[bucket_of(gap_s)] += 1
        now.longest_s[_ITL] = max(now.longest_s[_ITL], *gaps_s)
        now.counts[_OUTPUT_TOKENS] += len(gaps_s)

    def handed_off(self, attempt: Attempt, done: worker_pb2.HandoffDone) -> None:
        """By the decode worker's report; the prefill worker's is about the same bytes."""
        if done.HasField("received"):
            now_s = self._clock.now_s()
            self.slices.add(Count.HANDOFFS, 1, now_s)
            self.slices.add(Count.HANDOFF_BYTES, done.bytes, now_s)
            self.flows.handed_off((attempt.prefill_worker, attempt.decode_worker), done.bytes, now_s)

    def handoff_failed(self, run: RequestRun, fault: HandoffFault) -> None:
        if run.prefill is None or run.decode is None:
            return
        pair = run.prefill.key.worker_id, run.decode.key.worker_id
        self.flows.failed(pair)
        self.events.note(EventKind.HANDOFF_FAILED, Severity.BAD, " → ".join(pair), fault.cause.value.replace("_", " "))

    def requeued(self, run: RequestRun, cause: TandemError) -> None:
        worker = "" if run.decode is None else run.decode.key.worker_id
        text = f"requests went back in line: {cause.code.value.replace('_', ' ')}"
        self.events.note(EventKind.MIGRATION, Severity.WARNING, worker, text)

    def ended(self, run: RequestRun) -> None:
        now_s, final = self._clock.now_s(), run.stream.final
        self.slices.add(Count.NOT_FINISHED if final is None else Count.FINISHED, 1, now_s)
        if final is not None:
            self.slices.observe(Latency.E2E, final.timeline.total_s, now_s)
            if final.usage.completion_tokens > 1:
                tpot_s = final.timeline.decode_s / (final.usage.completion_tokens - 1)
                self.slices.observe(Latency.TPOT, tpot_s, now_s)

    def readiness(self, router_id: str, *, is_ready: bool) -> None:
        severity = Severity.GOOD if is_ready else Severity.BAD
        self.events.note(EventKind.ROUTER, severity, router_id, "ready" if is_ready else "not ready")
