"""The autoscaler in virtual time: the very policy that production runs, fed with what the simulated routers would tell.

Roles change; a worker is neither started nor stopped, so a simulation has as many as its spec.
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
from planner.simulator.recorder import Recorder
from planner.simulator.requests import MODEL
from planner.simulator.setup import Setup
from planner.traces.trace import TrafficTrace
from tandem.config.spec import Role

WINDOW_S = 10.0


class SimAutoscaler:
    """`role_changes`: when, and the pools' sizes from then on."""

    def __init__(
        self,
        cluster: SimCluster,
        trace: TrafficTrace,
        setup: Setup,
        objectives: Objectives,
        loop: EventLoop,
        seen: Recorder,
    ) -> None:
        spec, there_are = setup.autoscaler, sum(pool.workers for _, pool in setup.pools())
        prefill = spec.prefill.min if spec.prefill.min is not None else min(1, there_are - 1)
        limits = ScalingLimits(
            (there_are, there_are),
            (prefill, there_are if spec.prefill.max is None else spec.prefill.max),
            (spec.decode.min or 1, there_are if spec.decode.max is None else spec.decode.max),
            setup.prefill is not None and setup.prefill.tp == setup.decode.tp,
        )
        self.role_changes: list[tuple[float, int, int]] = []
        self._policy = Autoscaler(spec, limits, objectives)
        self._objectives = objectives
        self._cluster, self._trace, self._setup, self._loop, self._seen = cluster, trace, setup, loop, seen
        self._changed_s = 0.0
        loop.at(spec.interval_s, self._look)

    def _look(self) -> None:
        if self._seen.ended == len(self._trace):
            return
        now_s = self._loop.now_s()
        decision = self._policy.decide(self._view(now_s), now_s)
        if decision.action is ScalingAction.CHANGE_ROLES:
            self._cluster.fleet.set_roles(decision.target.prefill)
            self._policy.changed(decision, now_s)
            self._changed_s = now_s
            self.role_changes.append((now_s, *decision.target))
            self._cluster.pump()
        self._loop.at(now_s + self._setup.autoscaler.interval_s, self._look)

    def _view(self, now_s: float) -> PoolObservation:
        fleet, trace = self._cluster.fleet, self._trace
        first, last = np.searchsorted(trace.arrival_s, (now_s - WINDOW_S, now_s), side="right")
        came = slice(int(first), int(last))
        count = came.stop - came.start
        prompt_tokens = float(trace.prompt_tokens[came].mean()) if count else 1.0
        cached_tokens = float(self._seen.cached_tokens[came].mean()) if count else 0.0
        uncached = max(1.0, prompt_tokens - cached_tokens)
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
        )
        can = Capability(
            fleet.pace(Role.PREFILL).pace(),
            fleet.pace(Role.DECODE).pace(),
            self._setup.max_running_requests,
            self._setup.decode.kv_tokens,
            LocalPrompts.of(self._setup.router),
        )
        return PoolObservation(
            PoolSizes(fleet.size(Role.PREFILL), fleet.size(Role.DECODE)), load, can, self._measured(now_s)
        )

    def _measured(self, now_s: float) -> MeasuredRequests:
        since_s = max(now_s - WINDOW_S, self._changed_s + SETTLE_S)
        seen, arrival_s = self._seen, self._trace.arrival_s
        # Whoever has its first token now came lately; an answer may last longer.
        recent = int(np.searchsorted(arrival_s, now_s - 6 * WINDOW_S))
        began = np.nonzero(seen.first_token_s[recent:] >= since_s)[0] + recent
        ended = np.nonzero(seen.finished & (seen.last_token_s >= since_s))[0]
        decoding_s = seen.last_token_s[ended] - seen.first_token_s[ended]
        tpot_s = decoding_s / np.maximum(1, self._trace.output_tokens[ended] - 1)
        return MeasuredRequests(
            requests=began.size,
            ttft_s=float((seen.first_token_s[began] - arrival_s[began]).mean()) if began.size else None,
            judged=ended.size,
            missed_ttft=_beyond(seen.first_token_s[ended] - arrival_s[ended], self._objectives.ttft_s),
            missed_tpot=_beyond(tpot_s, self._objectives.tpot_s),
        )


def _beyond(times_s: NDArray[np.float64], limit_s: float | None) -> int:
    return 0 if limit_s is None else int((times_s > limit_s).sum())


def objectives_of(setup: Setup, ttft_s: float | None, tpot_s: float | None) -> Objectives:
    """Those that the simulation is judged by; where there are none, the classes'."""
    if ttft_s is None and tpot_s is None:
        return Objectives.of(setup.router.classes)
    return Objectives(ttft_s, tpot_s)
