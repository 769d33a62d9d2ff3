"""One request, of those on their way or the last that ended, as a row and as a timeline."""

from __future__ import annotations

from router.dashboard import snapshot
from router.observe.trace import Trace
from tandem.v1 import trace_pb2


def request_row(trace: Trace, state: str, cached_tokens: int, completion_tokens: int, now_s: float) -> snapshot.Request:
    last = trace.last
    first_tokens = [each.first_token_s for each in trace.attempts if each.first_token_s is not None]
    received = None if last is None or last.received is None else last.received.done
    return snapshot.Request(
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


def attempts(wire: trace_pb2.RequestTrace) -> list[snapshot.AttemptRow]:
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
