"""Counts and durations of each model's requests, as Triton's statistics extension reports them."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.requests import actions as act
from router.requests.facts import Arrived, Facts
from router.requests.state_machine import RequestRun
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.request import RequestState

_FAILURES = frozenset({RequestState.REJECTED, RequestState.FAILED})


class StatisticsMeter:
    """Since the router's start, over all protocols. Every event costs O(1)."""

    def __init__(self, unix_s: Callable[[], float] = time.time) -> None:
        self._unix_s = unix_s
        self._models: dict[str, oip.ModelStatistics] = {}

    def subscribe(self, facts: Facts) -> None:
        facts.subscribe(Arrived, "statistics", self._arrived)
        facts.subscribe(act.End, "statistics", self._ended)

    def of(self, model: str) -> oip.ModelStatistics:
        """The model's counters, without name and version. All zero before its first request."""
        return self._models.get(model) or oip.ModelStatistics()

    def _arrived(self, run: RequestRun, fact: Arrived, now_s: float) -> None:
        self._counted(run).last_inference = round(1000 * self._unix_s())

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        counted = self._counted(run)
        stats = counted.inference_stats
        if fact.final is not None:
            timeline = fact.final.timeline
            counted.inference_count += 1
            _add(stats.success, timeline.total_s)
            _add(stats.queue, timeline.queue_s)
            _add(stats.compute_infer, timeline.total_s - timeline.queue_s)
        elif fact.state in _FAILURES:
            _add(stats.fail, now_s - run.received_s)

    def _counted(self, run: RequestRun) -> oip.ModelStatistics:
        model = run.request.model
        if (found := self._models.get(model)) is None:
            found = self._models[model] = oip.ModelStatistics()
        return found


def _add(total: oip.StatisticDuration, duration_s: float) -> None:
    total.count += 1
    total.ns += round(1e9 * duration_s)
