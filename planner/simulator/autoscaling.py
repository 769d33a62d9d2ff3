"""The autoscaler in virtual time: production's policy, fed with what the simulated routers would report.

It changes roles, and neither starts nor stops workers: their number stays the one in the setup.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.autoscaler import (
    SETTLE_S,
    Autoscaler,
    MeasuredRequests,
    Objectives,
    PoolObservation,
    ScalingAction,
    ScalingLimits,
)
from planner.pool_forecast import Capability, LocalPrompts, ModelLoad, PoolSizes
from planner.simulator.cluster import SimCluster
from planner.simulator.events import EventLoop
from planner.simulator.measurements import RunMeasurements
from planner.simulator.requests import MODEL
from planner.simulator.setup import Setup
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role

WINDOW_S = 10.0


class SimAutoscaler:
    """`role_changes`: (time, prefill workers, decode workers) after each change."""

    def __init__(
        self,
        cluster: SimCluster,
        trace: TrafficTrace,
        setup: Setup,
        objectives: Objectives,
        loop: EventLoop,
        measurements: RunMeasurements,
    ) -> None:
        spec, total = setup.autoscaler, sum(pool.workers for _, pool in setup.pools())
        least = spec.prefill.min if spec.prefill.min is not None else min(1, total - setup.decode.workers)
        most = spec.prefill.max if setup.decode.batches is None else 0
        limits = ScalingLimits(
            (total, total),
            (least, total if most is None else most),
            (spec.decode.min or 1, total if spec.decode.max is None else spec.decode.max),
            setup.can_change_roles and (setup.prefill is None or setup.prefill.tp == setup.decode.tp),
        )
        self.role_changes: list[tuple[float, int, int]] = []
        self._policy = Autoscaler(spec, limits, objectives)
        self._objectives = objectives
        self._cluster, self._trace, self._setup, self._loop = cluster, trace, setup, loop
        self._measurements = measurements
        self._changed_s = 0.0
        loop.call_at(spec.interval_s, self._evaluate)

    def _evaluate(self) -> None:
        if self._measurements.ended == len(self._trace):
            return
        now_s = self._loop.now_s()
        decision = self._policy.decide(self._view(now_s), now_s)
        if decision.action is ScalingAction.CHANGE_ROLES:
            self._cluster.fleet.set_roles(decision.target.prefill)
            self._policy.changed(decision, now_s)
            self._changed_s = now_s
            self.role_changes.append((now_s, *decision.target))
            self._cluster.pump()
        self._loop.call_at(now_s + self._setup.autoscaler.interval_s, self._evaluate)

    def _view(self, now_s: float) -> PoolObservation:
        fleet, trace = self._cluster.fleet, self._trace
        first, last = np.searchsorted(trace.arrival_s, (now_s - WINDOW_S, now_s), side="right")
        arrived = slice(int(first), int(last))
        count = arrived.stop - arrived.start
        prompt_tokens = float(trace.prompt_tokens[arrived].mean()) if count else 1.0
        cached_tokens = float(self._measurements.cached_tokens[arrived].mean()) if count else 0.0
        uncached = max(1.0, prompt_tokens - cached_tokens)
        computed = trace.prompt_tokens[arrived] - self._measurements.cached_tokens[arrived]
        local = float(computed[self._measurements.is_local[arrived]].sum())
        answer_tokens = float(fleet.estimates.answer_tokens(MODEL))
        waiting = sum(each.prefill_tokens for each in self._cluster.core.waiting())
        on_workers = sum(worker.load().waiting_tokens for role in Role for worker in fleet.role(role))
        load = ModelLoad(
            requests_per_s=count / min(WINDOW_S, max(1.0, now_s)),
            uncached_tokens=uncached,
            context_tokens=prompt_tokens + answer_tokens,
            answer_tokens=answer_tokens,
            queued_tokens=waiting * uncached / prompt_tokens + on_workers,
            decoding_requests=float(sum(len(worker.scheduler.decoding) for worker in fleet.role(Role.DECODE))),
            local_share=local / max(1, computed.sum()),
        )
        capability = Capability(
            fleet.pace(Role.PREFILL).pace(),
            fleet.pace(Role.DECODE).pace(),
            self._setup.decode.max_running_requests or self._setup.max_running_requests,
            self._setup.decode.kv_tokens,
            LocalPrompts.of(self._setup.router, bounds_steps=self._setup.decode.longest_step_s is not None),
        )
        return PoolObservation(
            PoolSizes(fleet.size(Role.PREFILL), fleet.size(Role.DECODE)), load, capability, self._measured(now_s)
        )

    def _measured(self, now_s: float) -> MeasuredRequests:
        since_s = max(now_s - WINDOW_S, self._changed_s + SETTLE_S)
        measured, arrival_s = self._measurements, self._trace.arrival_s
        # First tokens in the window belong to recent arrivals; only ends may belong to older ones.
        recent = int(np.searchsorted(arrival_s, now_s - 6 * WINDOW_S))
        began = np.nonzero(measured.first_token_s[recent:] >= since_s)[0] + recent
        ended = np.nonzero(measured.finished & (measured.last_token_s >= since_s))[0]
        decoding_s = measured.last_token_s[ended] - measured.first_token_s[ended]
        tpot_s = decoding_s / np.maximum(1, self._trace.output_tokens[ended] - 1)
        refused = int((measured.refused_s >= since_s).sum())
        return MeasuredRequests(
            requests=began.size,
            ttft_s=float((measured.first_token_s[began] - arrival_s[began]).mean()) if began.size else None,
            judged=ended.size + refused,
            missed_ttft=refused
            + _count_above(measured.first_token_s[ended] - arrival_s[ended], self._objectives.ttft_s),
            missed_tpot=_count_above(tpot_s, self._objectives.tpot_s),
        )


def _count_above(times_s: NDArray[np.float64], limit_s: float | None) -> int:
    return 0 if limit_s is None else int((times_s > limit_s).sum())


def objectives_of(setup: Setup, ttft_s: float | None, tpot_s: float | None) -> Objectives:
    """The simulation's objectives; without any, those of the priority classes."""
    if ttft_s is None and tpot_s is None:
        return Objectives.of(setup.router.classes)
    return Objectives(ttft_s, tpot_s)
