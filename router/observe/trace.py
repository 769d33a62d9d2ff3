"""Request traces: the times the router measured, and the workers' reports converted to the router's clock.

A worker reports offsets from the time it began Reserve or Prefill; its link computes how long ago that was
(router.workers.clock_offset). Pure, except for the wall-clock time shown to users.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvtransfer.causes import HandoffFault
from router.request_terms import RequestTerms
from router.requests.output import Usage
from router.requests.protocols import Request
from tandem.errors import ErrorCode, TandemError
from tandem.request import RequestState
from tandem.telemetry.trace_context import TraceContext
from tandem.v1 import trace_pb2, worker_pb2


class Stage(StrEnum):
    """Drawn in docs/observability.md."""

    QUEUE = "queue"
    RESERVE = "reserve"
    DISPATCH = "dispatch"
    PREFILL = "prefill"
    CONNECT = "connect"
    PIECES = "pieces"
    VERIFY = "verify"
    FIRST_TOKEN = "first_token"
    JOIN = "join"
    DECODE = "decode"
    RETRY = "retry"  # a whole failed attempt; only in `Trace.to_first_token`


class Span(msgspec.Struct, frozen=True):  # several per request: created faster than a frozen dataclass
    """Seconds on the caller's clock."""

    stage: Stage
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's HandoffDone. `anchor_s`: zero of its stages on the router's clock."""

    done: worker_pb2.HandoffDone
    anchor_s: float

    def spans(self) -> list[Span]:
        found = received_spans(self.done) if self.done.HasField("received") else sent_spans(self.done)
        return [Span(each.stage, self.anchor_s + each.start_s, self.anchor_s + each.end_s) for each in found]


def received_spans(done: worker_pb2.HandoffDone) -> list[Span]:
    """The decode worker's spans, from Reserve on."""
    stages = done.received
    spans = []
    if stages.HasField("first_piece_s") and stages.HasField("last_piece_s"):
        spans.append(Span(Stage.PIECES, stages.first_piece_s, stages.last_piece_s))
    if stages.HasField("last_piece_s") and stages.HasField("verified_s"):
        spans.append(Span(Stage.VERIFY, stages.last_piece_s, stages.verified_s))
    since_s = stages.verified_s if stages.HasField("verified_s") else stages.first_token_s
    spans.append(Span(Stage.JOIN, since_s, stages.joined_s))
    return spans


def sent_spans(done: worker_pb2.HandoffDone) -> list[Span]:
    """The prefill worker's spans, from Prefill on; empty if it sent nothing."""
    stages = done.sent
    if stages.HasField("opened_s") and stages.HasField("linked_s"):
        return [Span(Stage.CONNECT, stages.opened_s, stages.linked_s)]
    return []


def overlap_share(done: worker_pb2.HandoffDone) -> float | None:
    """Share of the bytes that the receiver had acknowledged when the prefill worker finished the last layer. None if
    nothing was sent."""
    return done.sent.hidden_bytes / done.bytes if done.HasField("sent") and done.bytes else None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed. The exception is not stored: its traceback would keep the whole request alive."""

    code: ErrorCode
    message: str
    cause: str = ""  # of a handoff

    @classmethod
    def of(cls, error: TandemError) -> Failure:
        return cls(error.code, error.message, error.cause.value if isinstance(error, HandoffFault) else "")


@dataclass(slots=True)
class Attempt:
    """One attempt on a pair of workers. Times are on the router's clock. `computing_s`, `sampled_s`: when the worker
    that prefilled began to compute the prompt and sampled the first token, by its report; None: not reported."""

    wire_id: str
    prefill_worker: str  # empty: prefilled on the decode worker
    decode_worker: str
    queued_s: float
    dispatched_s: float
    reserved_s: float | None = None
    prefill_sent_s: float | None = None
    computing_s: float | None = None
    sampled_s: float | None = None
    first_token_s: float | None = None
    joined_s: float | None = None
    ended_s: float | None = None
    received: Report | None = None
    sent: Report | None = None
    failure: Failure | None = None

    def reserve_span(self) -> Span | None:
        return None if self.reserved_s is None else Span(Stage.RESERVE, self.dispatched_s, self.reserved_s)

    def to_first_token(self) -> Iterator[Span]:
        """Consecutive spans without gaps, as far as the attempt got. Clipped where clocks differ by a frame's delay."""
        yield Span(Stage.QUEUE, self.queued_s, self.dispatched_s)
        if reserve := self.reserve_span():
            yield reserve
        sent_s, first_s = self.prefill_sent_s if self.prefill_worker else self.dispatched_s, self.first_token_s
        if sent_s is None or first_s is None:
            return
        start_s, end_s = sent_s, first_s
        if self.computing_s is not None and self.sampled_s is not None:
            start_s = min(max(sent_s, self.computing_s), first_s)
            end_s = min(max(start_s, self.sampled_s), first_s)
            yield Span(Stage.DISPATCH, sent_s, start_s)
        yield Span(Stage.PREFILL, start_s, end_s)
        yield Span(Stage.FIRST_TOKEN, end_s, first_s)

    def spans(self) -> Iterator[Span]:
        yield from self.to_first_token()
        yield from self.received.spans() if self.received else ()
        yield from self.sent.spans() if self.sent else ()
        decode_s = self.joined_s if self.prefill_worker else self.first_token_s
        if decode_s is not None and self.ended_s is not None:
            yield Span(Stage.DECODE, decode_s, self.ended_s)

    def joined_at_s(self) -> float | None:
        """When it joined the decode batch, by the decode worker's report: the report's frame arrives a step later."""
        if self.received is None:
            return None
        return self.received.anchor_s + self.received.done.received.joined_s

    def exposed_s(self) -> float | None:
        """The handoff's latency not hidden by computing: from the last layer to the join."""
        joined_s = self.joined_at_s()
        if joined_s is None or self.sent is None or not self.sent.done.sent.HasField("last_layer_s"):
            return None
        return max(0.0, joined_s - self.sent.anchor_s - self.sent.done.sent.last_layer_s)


@dataclass(slots=True)
class Trace:
    """One request. `model`: as clients name it; may be an adapter's name. `received_unix_s`: wall-clock time, for
    display only. `arrived_s`: when its first byte was read; `received_s`: when it was parsed. `client_id`: the client's
    own id; may be empty."""

    request_id: str
    model: str
    prompt_tokens: int
    received_s: float
    arrived_s: float | None = None
    context: TraceContext | None = None
    client_id: str = ""
    received_unix_s: float = field(default_factory=time.time)
    attempts: list[Attempt] = field(default_factory=list)
    state: RequestState = RequestState.RECEIVED
    error: ErrorCode | None = None
    usage: Usage | None = None
    cached_tokens_prefill: int = 0
    cached_tokens_decode: int = 0
    ended_s: float | None = None

    @classmethod
    def of(cls, request: Request, terms: RequestTerms, received_s: float) -> Trace:
        return cls(
            request.request_id,
            request.adapter_name or request.model,
            request.prompt_tokens,
            received_s,
            arrived_s=terms.arrived_s,
            context=terms.trace,
            client_id=terms.client_id,
        )

    @property
    def trace_id(self) -> str:
        """Trace id of the W3C trace context; empty: it has none."""
        return "" if self.context is None else self.context.trace_id

    def names(self) -> dict[str, str]:
        """The request's ids, as log fields."""
        return {"request": self.request_id} | ({"trace_id": self.trace_id} if self.context is not None else {})

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    def begin(self, wire_id: str, prefill_worker: str, decode_worker: str, now_s: float) -> None:
        """Begins an attempt on these workers."""
        last = self.last
        queued_s = self.received_s if last is None or last.ended_s is None else last.ended_s
        self.attempts.append(Attempt(wire_id, prefill_worker, decode_worker, queued_s, now_s))

    def failed(self, error: TandemError, now_s: float) -> None:
        """Ends the current attempt, if any, with `error`. Later errors are ignored."""
        if (last := self.last) is not None and last.ended_s is None:
            last.failure, last.ended_s = Failure.of(error), now_s

    def to_first_token(self) -> Iterator[Span]:
        """Consecutive spans from receipt to the first token, without gaps. For a request that has its first token."""
        for attempt in self.attempts:
            if attempt.first_token_s is not None:
                yield from attempt.to_first_token()
                return
            yield Span(Stage.QUEUE, attempt.queued_s, attempt.dispatched_s)
            if attempt.ended_s is not None:
                yield Span(Stage.RETRY, attempt.dispatched_s, attempt.ended_s)

    def report(self, done: worker_pb2.HandoffDone, anchor_s: float) -> Attempt | None:
        """Adds a worker's report to its attempt, possibly after the request's end. Returns the attempt."""
        attempt = self.attempt(done.request_id)
        if attempt is not None and done.HasField("received"):
            attempt.received = Report(done, max(anchor_s, attempt.dispatched_s))
        elif attempt is not None and done.HasField("sent"):
            attempt.sent = Report(done, max(anchor_s, attempt.prefill_sent_s or attempt.dispatched_s))
        return attempt

    def attempt(self, wire_id: str) -> Attempt | None:
        return next((each for each in reversed(self.attempts) if each.wire_id == wire_id), None)

    def end(self, state: RequestState, error: ErrorCode | None, usage: Usage | None, now_s: float) -> None:
        self.state, self.error, self.usage, self.ended_s = state, error, usage, now_s
        if (last := self.last) is not None and last.ended_s is None:
            last.ended_s = now_s

    def to_wire(self) -> trace_pb2.RequestTrace:
        first_token_s = [each.first_token_s for each in self.attempts if each.first_token_s is not None]
        wire = trace_pb2.RequestTrace(
            request_id=self.request_id,
            model=self.model,
            state=self.state.value,
            error="" if self.error is None else self.error.value,
            received_unix_s=self.received_unix_s,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=0 if self.usage is None else self.usage.completion_tokens,
            accepted_tokens=0 if self.usage is None else self.usage.accepted_tokens,
            unused_tokens=0 if self.usage is None else self.usage.unused_tokens,
            cached_tokens_prefill=self.cached_tokens_prefill,
            cached_tokens_decode=self.cached_tokens_decode,
            total_s=0.0 if self.ended_s is None else self.ended_s - self.received_s,
            attempts=[_attempt(attempt, self.received_s) for attempt in self.attempts],
        )
        if first_token_s:  # the answer's, also if a later attempt continued it
            wire.first_token_s = first_token_s[0] - self.received_s
        return wire


def _attempt(attempt: Attempt, zero_s: float) -> trace_pb2.Attempt:
    spans = sorted(attempt.spans(), key=lambda span: span.start_s)
    wire = trace_pb2.Attempt(
        prefill_worker=attempt.prefill_worker,
        decode_worker=attempt.decode_worker,
        spans=[
            trace_pb2.Span(stage=span.stage.value, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
            for span in spans
        ],
        exposed_s=attempt.exposed_s(),
    )
    if attempt.received is not None:
        done = attempt.received.done
        wire.bytes, wire.blocks, wire.pieces = done.bytes, done.blocks, done.pieces
        wire.transports.extend(done.transports)
        wire.received.CopyFrom(done.received)
    if attempt.sent is not None:
        done = attempt.sent.done
        wire.sent_bytes, wire.hidden_bytes = done.bytes, done.sent.hidden_bytes
        wire.sent.CopyFrom(done.sent)
        share = overlap_share(done)
        if share is not None:
            wire.overlap_share = share
    if (failure := attempt.failure) is not None:
        wire.error, wire.message, wire.cause = failure.code.value, failure.message, failure.cause
    return wire
