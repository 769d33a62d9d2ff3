"""Derives the health of workers from requests."""

from __future__ import annotations

from router.requests import actions as act
from router.requests.facts import Facts
from router.requests.placer import Placer
from router.requests.state_machine import RequestRun
from router.workers.fleet import Fleet

LATENCY_TOKENS = 64  # prefill latency is scaled to 64 tokens; a shorter prompt's is taken whole
LEAST_TOKENS = 8  # shorter answers are too few tokens to measure the time per token


class HealthFromRequests:
    """An observer that feeds the fleet's health board."""

    def __init__(self, fleet: Fleet, placer: Placer) -> None:
        self._fleet, self._placer = fleet, placer

    def subscribe(self, facts: Facts) -> None:
        facts.subscribe(act.FirstToken, "health", self._first_token)
        facts.subscribe(act.WorkersBlamed, "health", self._blamed)
        facts.subscribe(act.End, "health", self._ended)

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        """Prefill latency counts from the later of the prompt's dispatch and the end of the previous prompt."""
        if (worker := self._fleet.find(fact.worker)) is None:
            return
        began_s, worker.last_prefill_s = max(fact.sent_s, worker.last_prefill_s), now_s
        if run.prefill is None or run not in self._placer:
            return
        tokens = self._placer.prefill_tokens(run)
        latency_s = (now_s - began_s) * LATENCY_TOKENS / max(tokens, LATENCY_TOKENS)
        self._fleet.health.succeeded(worker.key, now_s, latency_s)

    def _blamed(self, run: RequestRun, fact: act.WorkersBlamed, now_s: float) -> None:
        for key in fact.workers:
            self._fleet.health.failed(key, now_s)

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        if fact.final is None or run.decode is None:
            return
        tokens = fact.usage.completion_tokens
        is_whole = run.attempts == 1 and tokens >= LEAST_TOKENS
        tpot_s = fact.final.timeline.decode_s / (tokens - 1) if is_whole else None
        self._fleet.health.succeeded(run.decode, now_s, tpot_s)
