"""What requests on their way show of their workers' pace, told to router.policies.estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.observe.trace import Attempt
from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.requests.run import RequestRun

PACE_TOKENS = 8


class PaceMeter:
    """One request's tokens in the decode batch, timed PACE_TOKENS at a time."""

    __slots__ = ("_since_s", "_tokens")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The next token begins anew: it comes from elsewhere."""
        self._tokens = 0
        self._since_s: float | None = None

    def token(self, now_s: float) -> float | None:
        """Seconds of the last PACE_TOKENS tokens, each time there are as many."""
        since_s = self._since_s
        if since_s is None:
            self._since_s = now_s
            return None
        self._tokens += 1
        if self._tokens < PACE_TOKENS:
            return None
        self._tokens, self._since_s = 0, now_s
        return now_s - since_s


def observe_prefill(run: RequestRun) -> None:
    """At the first token of an answer."""
    attempt, prefiller = run.trace.last, run.prefill or run.decode
    if attempt is None or prefiller is None or attempt.first_token_s is None:
        return
    sent_s = attempt.dispatched_s if attempt.prefill_sent_s is None else attempt.prefill_sent_s
    computed_tokens = max(1, run.request.prompt_tokens - run.cached_tokens)
    prefiller.estimates.prefilled(run.tokens_ahead + computed_tokens, attempt.first_token_s - sent_s)
    if run.decode is not None and (span := attempt.reserve_span()) is not None:
        run.decode.estimates.reserved(span.duration_s)


def observe_handoff(run: RequestRun, attempt: Attempt, done: worker_pb2.HandoffDone) -> None:
    """At the decode worker's report that the request joined."""
    joined_s = attempt.joined_at_s()
    if not done.HasField("received") or joined_s is None or attempt.first_token_s is None:
        return
    if run.decode is None or run.prefill is None:
        return
    tokens = done.blocks * run.request.block_tokens
    exposed_s = max(0.0, joined_s - attempt.first_token_s)
    run.decode.estimates.received(tokens, exposed_s)
    key = run.decode.key
    run.prefill.estimates.sent((key.worker_id, key.epoch), tokens, exposed_s)


def observe_decode(run: RequestRun, seconds: float) -> None:
    """As often as the run's PaceMeter says."""
    if run.decode is not None:
        run.decode.estimates.decoded(run.decode.running_requests, PACE_TOKENS, seconds)
