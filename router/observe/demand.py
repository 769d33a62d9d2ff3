"""Counts each model's demand and its service level for the autoscaler. Batch classes are left out: they use spare
capacity, and pools are not sized for them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from router.observe.slo import SloOutcome, slo_outcome
from router.policies.pace import Pace
from router.requests import actions as act
from router.requests.facts import Arrived, Facts
from router.requests.state_machine import RequestRun
from router.workers.fleet import Fleet
from tandem.config.model import Role
from tandem.config.router import ClassSpec
from tandem.request import RequestState
from tandem.v1 import trace_pb2

_LATE = (SloOutcome.MISSED_TTFT, SloOutcome.MISSED_BOTH)
_SLOW = (SloOutcome.MISSED_TPOT, SloOutcome.MISSED_BOTH)


class DemandMeter:
    """Every event costs O(1); `report` reads the queue and the fleet."""

    def __init__(self, classes: Sequence[ClassSpec], fleet: Fleet) -> None:
        self._fleet = fleet
        self._classes = {each.name: each for each in classes if not each.batch}
        self._models: dict[str, trace_pb2.ModelDemand] = {}
        self._epoch = secrets.randbits(62) + 1

    def subscribe(self, facts: Facts) -> None:
        facts.subscribe(Arrived, "demand", self._received)
        facts.subscribe(act.FirstToken, "demand", self._first_token)
        facts.subscribe(act.End, "demand", self._ended)

    def _received(self, run: RequestRun, fact: Arrived, now_s: float) -> None:
        if run.terms.priority in self._classes:
            demand = self._of(run.request.model)
            demand.requests += 1
            demand.prompt_tokens += run.request.prompt_tokens

    def _first_token(self, run: RequestRun, fact: act.FirstToken, now_s: float) -> None:
        if fact.of_answer and run.terms.priority in self._classes:
            demand = self._of(run.request.model)
            demand.first_tokens += 1
            demand.prefilled_tokens += run.request.prompt_tokens
            demand.cached_tokens += run.cached_tokens
            worker = self._fleet.find(fact.worker)
            if run.prefill is None and worker is not None and worker.role is Role.DECODE:
                demand.local_tokens += run.request.prompt_tokens - run.cached_tokens
            demand.ttft_s += now_s - run.received_s

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        if (objectives := self._classes.get(run.terms.priority)) is None:
            return
        final, state, demand = fact.final, fact.state, self._of(run.request.model)
        code = None if fact.error is None else fact.error.code
        if final is not None:
            demand.finished += 1
            demand.answer_tokens += final.usage.completion_tokens
        if (outcome := slo_outcome(objectives, final, state, code)) is not None:
            demand.judged += 1
            demand.missed_ttft += outcome in _LATE or state is RequestState.REJECTED
            demand.missed_tpot += outcome in _SLOW

    def report(self, waiting: Iterable[RequestRun], fleet: Fleet) -> trace_pb2.RouterDemand:
        for demand in self._models.values():
            demand.queued_tokens = 0
        for run in waiting:
            if run.terms.priority in self._classes:
                self._of(run.request.model).queued_tokens += run.prefill_tokens
        for model, demand in self._models.items():
            demand.ClearField("prefill")
            demand.ClearField("decode")
            if prefill := fleet.ready(model, Role.PREFILL):
                demand.prefill.CopyFrom(_mean([worker.estimates.pace() for worker in prefill]))
            if decode := fleet.ready(model, Role.DECODE):
                demand.decode.CopyFrom(_mean([worker.estimates.pace() for worker in decode]))
        return trace_pb2.RouterDemand(models=self._models.values(), life=self._epoch)

    def _of(self, model: str) -> trace_pb2.ModelDemand:
        if (found := self._models.get(model)) is None:
            found = self._models[model] = trace_pb2.ModelDemand(model=model)
        return found


def _mean(paces: Sequence[Pace]) -> trace_pb2.Pace:
    return trace_pb2.Pace(**asdict(Pace.mean(paces)))
