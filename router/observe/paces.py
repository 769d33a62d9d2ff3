"""What requests show of their workers' pace, for `router.policies.estimates`."""

from __future__ import annotations

from router.observe.trace import Traces
from router.requests import actions as act
from router.requests.facts import Facts
from router.requests.run import RequestRun
from router.requests.timeline import PACE_TOKENS
from router.workers.fleet import Fleet
from tandem.v1 import worker_pb2


class Paces:
    """An observer that feeds each worker's estimates."""

    def __init__(self, fleet: Fleet, traces: Traces) -> None:
        self._fleet, self._traces = fleet, traces

    def subscribe(self, facts: Facts) -> None:
        name = "paces"
        facts.subscribe(act.FirstToken, name, self._first_token)
        facts.subscribe(act.HandoffSeen, name, self._handoff_seen)
        facts.subscribe(act.DecodePaced, name, self._paced)
        facts.subscribe(act.End, name, self._ended)

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        """Of an answer: a continuation has another prompt."""
        attempt, prefiller = self._traces.attempt(run), self._fleet.find(fact.worker)
        if not fact.of_answer or attempt is None or prefiller is None or attempt.first_token_s is None:
            return
        sent_s = attempt.dispatched_s if attempt.prefill_sent_s is None else attempt.prefill_sent_s
        computed_tokens = max(1, run.request.prompt_tokens - run.cached_tokens)
        prefiller.estimates.prefilled(run.tokens_ahead + computed_tokens, attempt.first_token_s - sent_s)
        decode = None if run.decode is None else self._fleet.find(run.decode)
        if decode is not None and (span := attempt.reserve_span()) is not None:
            decode.estimates.reserved(span.duration_s)

    def _handoff_seen(self, run: RequestRun, fact: act.HandoffSeen, now_s: float) -> None:
        """The decode worker's report that the request joined."""
        done, attempt = fact.report, self._traces.reported(run, fact.wire_id)
        if attempt is None or not isinstance(done, worker_pb2.HandoffDone) or not done.HasField("received"):
            return
        if run.decode is None or run.prefill is None:
            return
        joined_s = attempt.joined_at_s()
        if joined_s is None or attempt.first_token_s is None:
            return
        tokens = done.blocks * run.request.block_tokens
        exposed_s = max(0.0, joined_s - attempt.first_token_s)
        decode, prefill = self._fleet.find(run.decode), self._fleet.find(run.prefill)
        if decode is not None:
            decode.estimates.received(tokens, exposed_s)
        if prefill is not None:
            prefill.estimates.sent((run.decode.worker_id, run.decode.epoch), tokens, exposed_s)

    def _paced(self, run: RequestRun, fact: act.DecodePaced, now_s: float) -> None:
        if run.decode is not None and (decode := self._fleet.find(run.decode)) is not None:
            decode.estimates.decoded(decode.running_requests, PACE_TOKENS, fact.seconds)

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        if fact.final is not None:
            self._fleet.estimates.answered(run.request.model, fact.usage.completion_tokens)
