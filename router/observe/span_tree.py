"""One finished request as a tree of spans, each under the service that did the work. Pure.

request ┬ parse
        ├ queue                       one for each attempt
        └ attempt ┬ reserve ─ dispatch ─ prefill ─ first_token      consecutive, without gaps
                  └ connect, pieces, verify, join, decode           in parallel and after them
"""

from __future__ import annotations

from dataclasses import dataclass

from router.observe.trace import Attempt, Stage, Trace, overlap_share
from tandem.telemetry.spans import FinishedSpan, Service

REQUEST, PARSE, ATTEMPT = "request", "parse", "attempt"
_TO_FIRST_TOKEN = (Stage.QUEUE, Stage.RESERVE, Stage.DISPATCH, Stage.PREFILL, Stage.FIRST_TOKEN)
CHAIN = (PARSE, *(stage.value for stage in _TO_FIRST_TOKEN))
"""With one attempt, the durations of these spans add up to the time to first token."""

_DECODE_STAGES = frozenset({Stage.PIECES, Stage.VERIFY, Stage.JOIN, Stage.DECODE})


@dataclass(slots=True)
class _Tree:
    trace: Trace
    router_id: str
    spans: list[FinishedSpan]

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        parent: int | None,
        *,
        at: tuple[Service, str] | None = None,
        attributes: dict[str, str | int | float | bool] | None = None,
        links: tuple[int, ...] = (),
        error: str | None = None,
    ) -> int:
        service, instance = at or (Service.ROUTER, self.router_id)
        zero_s = self.trace.received_unix_s - self.trace.received_s
        span = FinishedSpan(
            name, service, instance, zero_s + start_s, zero_s + end_s, parent, attributes or {}, links, error
        )
        self.spans.append(span)
        return len(self.spans) - 1


def span_tree(trace: Trace, router_id: str) -> list[FinishedSpan]:
    """The spans of an ended trace, parents first. Times are on the wall clock of the router's host."""
    tree = _Tree(trace, router_id, [])
    arrived_s = trace.received_s if trace.arrived_s is None else trace.arrived_s
    ended_s = trace.received_s if trace.ended_s is None else trace.ended_s
    error = None if trace.error is None else trace.error.value
    root = tree.add(REQUEST, arrived_s, ended_s, None, attributes=_request_attributes(trace), error=error)
    tree.add(PARSE, arrived_s, trace.received_s, root)
    previous: tuple[int, ...] = ()
    for attempt in trace.attempts:
        tree.add(Stage.QUEUE.value, attempt.queued_s, attempt.dispatched_s, root)
        end_s = ended_s if attempt.ended_s is None else attempt.ended_s
        parent = tree.add(
            ATTEMPT,
            attempt.dispatched_s,
            end_s,
            root,
            attributes=_attempt_attributes(attempt),
            links=previous,  # the attempt it retries
            error=None if attempt.failure is None else attempt.failure.code.value,
        )
        previous = (parent,)
        for span in attempt.spans():
            if span.stage is not Stage.QUEUE:
                tree.add(span.stage.value, span.start_s, span.end_s, parent, at=_owner(attempt, span.stage))
    if not trace.attempts:
        tree.add(Stage.QUEUE.value, trace.received_s, ended_s, root)
    return tree.spans


def _owner(attempt: Attempt, stage: Stage) -> tuple[Service, str] | None:
    """The service and instance that did the work; None: the router."""
    if stage in _DECODE_STAGES or (stage is Stage.PREFILL and not attempt.prefill_worker):
        return Service.DECODE, attempt.decode_worker
    if stage is Stage.PREFILL or stage is Stage.CONNECT:
        return Service.PREFILL, attempt.prefill_worker
    return None


def _request_attributes(trace: Trace) -> dict[str, str | int | float | bool]:
    """Uses OpenTelemetry's semantic conventions for generative AI where they define a name."""
    found: dict[str, str | int | float | bool] = {
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.request_id,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "tandem.state": trace.state.value,
    }
    if trace.usage is not None:
        found["gen_ai.usage.output_tokens"] = trace.usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = trace.usage.cached_tokens
        if trace.usage.accepted_tokens or trace.usage.unused_tokens:
            found["tandem.accepted_tokens"] = trace.usage.accepted_tokens
            found["tandem.unused_tokens"] = trace.usage.unused_tokens
    first_s = next((each.first_token_s for each in trace.attempts if each.first_token_s is not None), None)
    if first_s is not None:
        found["tandem.ttft_s"] = first_s - (trace.received_s if trace.arrived_s is None else trace.arrived_s)
    return found


def _attempt_attributes(attempt: Attempt) -> dict[str, str | int | float | bool]:
    found: dict[str, str | int | float | bool] = {"tandem.decode_worker": attempt.decode_worker}
    if attempt.prefill_worker:
        found["tandem.prefill_worker"] = attempt.prefill_worker
    if attempt.received is not None:
        done = attempt.received.done
        found |= {
            "tandem.handoff.bytes": done.bytes,
            "tandem.handoff.blocks": done.blocks,
            "tandem.handoff.transports": ", ".join(done.transports),
            "tandem.handoff.pieces": done.pieces,
        }
    if attempt.sent is not None and (share := overlap_share(attempt.sent.done)) is not None:
        found["tandem.handoff.overlap_share"] = share
    return found
