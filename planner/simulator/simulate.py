"""Runs a trace through a simulated cluster."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.simulator.autoscaling import SimAutoscaler, objectives_of
from planner.simulator.cluster import SimCluster
from planner.simulator.events import EventLoop
from planner.simulator.fleet import SimFleet
from planner.simulator.measurements import RunMeasurements
from planner.simulator.papers import with_paper
from planner.simulator.result import SimResult, summarize
from planner.simulator.setup import Fault, FaultKind, Setup, Slo
from planner.traces.context import within_context
from planner.traces.trace import MeasuredTimes, TrafficTrace
from tandem.config.model import Role
from tandem.errors import ConfigError, InternalError

Progress = Callable[[int], None]  # requests that have arrived
_PROGRESS_EVERY = 256


@dataclass(frozen=True, slots=True)
class _Run:
    setup: Setup
    measurements: RunMeasurements
    fleet: SimFleet
    role_changes: tuple[tuple[float, int, int], ...]


def simulate(
    trace: TrafficTrace,
    setup: Setup,
    slo: Slo | None = None,
    *,
    progress: Progress | None = None,
    most_misses: int | None = None,
) -> SimResult:
    """Simulates every request of `trace` to its end, or until more than `most_misses` have missed an objective.

    Answers end where the context does. Raises ConfigError if a fault names an unknown worker, an objective an unknown
    class, or the paper is about other clusters.
    """
    slo, trace = slo or Slo(), within_context(trace, setup.max_model_tokens)
    run = _run(trace, setup, slo, progress, most_misses)
    result = summarize(trace, run.setup, slo, run.measurements, run.fleet)
    return replace(result, role_changes=run.role_changes)


def simulated_times(trace: TrafficTrace, setup: Setup) -> MeasuredTimes:
    """What each request takes; NaN: it does not finish. Raises ConfigError as `simulate` does."""
    trace = within_context(trace, setup.max_model_tokens)
    found = _run(trace, setup, Slo(), None, None).measurements
    first_s, is_over = found.first_token_s, found.finished
    ttft_s = np.where(is_over, first_s - trace.arrival_s, np.nan)
    return MeasuredTimes(ttft_s, np.where(is_over, found.last_token_s - first_s, np.nan))


def _run(trace: TrafficTrace, setup: Setup, slo: Slo, progress: Progress | None, most_misses: int | None) -> _Run:
    loop = EventLoop()
    measurements = RunMeasurements(trace, slo, setup.fixed_s)
    setup, rules = with_paper(replace(setup, caches=trace.prefixes is not None), slo)
    cluster = SimCluster(trace, setup, rules, loop, measurements)
    for fault in setup.faults:
        _plan_fault(fault, cluster, loop)

    autoscaler = None
    if setup.autoscaler.enabled:
        objectives = objectives_of(setup, slo.ttft_s, slo.tpot_s)
        autoscaler = SimAutoscaler(cluster, trace, setup, objectives, loop, measurements)

    def arrive(index: int) -> None:
        """At the router's queue."""
        if index + 1 < len(trace):
            loop.call_at(float(trace.arrival_s[index + 1]) + setup.fixed_s, arrive, index + 1)
        if progress is not None and index % _PROGRESS_EVERY == 0:
            progress(index)
        cluster.arrive(index)

    loop.call_at(float(trace.arrival_s[0]) + setup.fixed_s, arrive, 0)
    # Millions of small objects with few cycles: garbage collection would take a third of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        loop.run(_never if most_misses is None else lambda: measurements.misses > most_misses)
    finally:
        if was_enabled:
            gc.enable()
    if most_misses is None or measurements.misses <= most_misses:
        _check_conservation(cluster, measurements)
    return _Run(setup, measurements, cluster.fleet, () if autoscaler is None else tuple(autoscaler.role_changes))


def _never() -> bool:
    return False


def _plan_fault(fault: Fault, cluster: SimCluster, loop: EventLoop) -> None:
    if fault.kind is FaultKind.REDIS:
        loop.call_at(fault.at_s, cluster.cache.redis_lost)
        if fault.for_s is not None:
            loop.call_at(fault.at_s + fault.for_s, cluster.cache.redis_back)
        return
    if fault.worker_id not in cluster.fleet.workers:
        known = ", ".join(list(cluster.fleet.workers)[:8])
        raise ConfigError(f"--fault: expected a worker ({known}, ...), got {fault.worker_id!r}", field="--fault")
    if fault.kind is FaultKind.WORKER:
        loop.call_at(fault.at_s, cluster.lose_worker, fault.worker_id, fault.for_s)
        return
    loop.call_at(fault.at_s, cluster.slow_link, fault.worker_id, fault.factor)
    if fault.for_s is not None:
        loop.call_at(fault.at_s + fault.for_s, cluster.slow_link, fault.worker_id, 1.0)


def _check_conservation(cluster: SimCluster, measurements: RunMeasurements) -> None:
    """Checks that every request ended once, no block is held, and every block is in one state."""
    if cluster.active or measurements.ended != len(measurements.state):
        raise InternalError(f"{cluster.active} simulated requests never ended")
    if failures := cluster.core.facts.failures:
        raise InternalError(f"observers failed in a simulation: {dict(failures)}")
    for role in Role:
        for worker in cluster.fleet.role(role):
            counts = worker.blocks.counts()
            if not counts.conserved or counts.in_use or counts.leased:
                raise InternalError(f"simulated {worker.key.worker_id} holds blocks of requests that ended: {counts}")
