"""The result of a simulation: the outcome of the run, and the use of workers and links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.simulator.fleet import SimFleet
from planner.simulator.measurements import RunMeasurements
from planner.simulator.outcome import Outcome, outcome_fields
from planner.simulator.setup import Setup, Slo
from planner.simulator.worker import SimWorker
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role


@dataclass(frozen=True, slots=True)
class PoolUse:
    workers: int
    busy: float  # share of the time in which a worker ran steps, mean
    busiest: float  # the largest such share
    sent: float  # share of the time in which a worker's link was sending, mean
    received: float
    bytes_sent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult(Outcome):
    hit_rate: float
    handoffs: int
    kv_bytes_moved: float
    migrated: int
    migrations: int
    local_prefills: int
    pools: Mapping[str, PoolUse]
    role_changes: tuple[tuple[float, int, int], ...] = ()  # by the autoscaler: time, prefill, decode workers


def summarize(trace: TrafficTrace, setup: Setup, slo: Slo, measurements: RunMeasurements, fleet: SimFleet) -> SimResult:
    fields = outcome_fields(trace, slo, measurements)
    workers = [*fleet.workers.values(), *fleet.lost_workers]
    by_role = {role: [each for each in workers if each.role is role] for role in Role}
    return SimResult(
        **fields,
        kv_bytes_moved=sum(each.egress.moved_bytes for each in workers),
        migrated=int((measurements.migrations > 0).sum()),
        migrations=int(measurements.migrations.sum()),
        local_prefills=measurements.local_prefills,
        pools={role.value: _use(mine, fields["seconds"]) for role, mine in by_role.items() if mine},
    )


def _use(epochs: list[SimWorker], seconds: float) -> PoolUse:
    """A worker that was lost and came back is one worker."""
    of_worker = defaultdict[str, NDArray[np.float64]](lambda: np.zeros(3))
    for each in epochs:
        of_worker[each.key.worker_id] += (each.busy_s, each.egress.busy_s, each.ingress.busy_s)
    shares = np.array([*of_worker.values()]) / seconds
    busy, sent, received = shares.mean(axis=0).tolist()
    return PoolUse(
        workers=sum(not each.lost for each in epochs),
        busy=busy,
        busiest=float(shares[:, 0].max()),
        sent=sent,
        received=received,
        bytes_sent=sum(each.egress.moved_bytes for each in epochs),
    )
