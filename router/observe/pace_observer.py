"""Measures the pace of workers from requests, for `router.policies.pace_estimates`."""

from __future__ import annotations

from typing import Protocol

from router.policies.pace_estimates import Estimates, WorkerEstimates
from router.prefix_index.mirror import WorkerKey
from router.requests import actions as act
from router.requests.facts import Facts
from router.requests.state_machine import RequestRun

LEAST_GAPS = 8  # fewer say little about a pace


class MeasuredFleet(Protocol):
    """Workers with their pace estimates: the router's fleet or the simulator's."""

    @property
    def estimates(self) -> Estimates: ...

    def estimates_of(self, key: WorkerKey) -> WorkerEstimates | None:
        """None: the worker has left."""
        ...

    def running_requests_of(self, key: WorkerKey) -> int: ...


class PaceObserver:
    """An observer that feeds each worker's estimates."""

    def __init__(self, fleet: MeasuredFleet) -> None:
        self._fleet = fleet

    def subscribe(self, facts: Facts) -> None:
        name = "paces"
        facts.subscribe(act.FirstToken, name, self._first_token)
        facts.subscribe(act.HandoffSeen, name, self._handoff_seen)
        facts.subscribe(act.TokenGaps, name, self._token_gaps)
        facts.subscribe(act.End, name, self._ended)

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        """Skips continuations: their prompt includes part of the answer."""
        if not fact.of_answer:
            return
        computed_tokens = max(1, run.request.prompt_tokens - run.cached_tokens)
        if (prefiller := self._fleet.estimates_of(fact.worker)) is not None:
            prefiller.prefilled(run.tokens_ahead + computed_tokens, now_s - fact.sent_s)
        if fact.reserve_s is not None and (decode := self._decode(run)) is not None:
            decode.reserved(fact.reserve_s)

    def _handoff_seen(self, run: RequestRun, fact: act.HandoffSeen, now_s: float) -> None:
        if fact.exposed_s is None or run.decode is None or run.prefill is None:
            return
        tokens = fact.moved_blocks * run.request.block_tokens
        if (decode := self._decode(run)) is not None:
            decode.received(tokens, fact.exposed_s)
        if (prefill := self._fleet.estimates_of(run.prefill)) is not None:
            prefill.sent((run.decode.worker_id, run.decode.epoch), tokens, fact.exposed_s)

    def _token_gaps(self, run: RequestRun, fact: act.TokenGaps, now_s: float) -> None:
        if not fact.is_paced or len(fact.gaps_s) < LEAST_GAPS or run.decode is None:
            return
        if (decode := self._decode(run)) is not None:
            decode.decoded(self._fleet.running_requests_of(run.decode), len(fact.gaps_s), sum(fact.gaps_s))

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        if fact.final is not None and run.request.sampling.max_tokens > 1:  # else it says nothing of others' answers
            self._fleet.estimates.answered(run.request.model, fact.usage.completion_tokens)

    def _decode(self, run: RequestRun) -> WorkerEstimates | None:
        return None if run.decode is None else self._fleet.estimates_of(run.decode)
