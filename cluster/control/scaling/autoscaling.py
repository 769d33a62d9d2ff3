"""The autoscaler's loop: observes the pools, runs the policy (planner/autoscaler.py) and scales like `tandem scale`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from cluster.control.scaling.observed_load import ObservedLoad
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.workers import Workers
from cluster.spec.resolve import ResolvedModel
from cluster.tasks import count_failure, keep_running
from planner.autoscaler import (
    SETTLE_S,
    Autoscaler,
    Objectives,
    PoolObservation,
    ScalingAction,
    ScalingDecision,
    ScalingLimits,
)
from planner.pool_forecast import LocalPrompts, PoolSizes
from tandem.config.model import ModelSpec, Role
from tandem.config.spec import ClusterSpec
from tandem.errors import TandemError
from tandem.v1 import cluster_pb2, trace_pb2, worker_pb2

log = logging.getLogger(__name__)

KEPT_DECISIONS = 20
DONE, DRY_RUN, UNDER_WAY = "done", "dry_run", "under_way"


class DemandSource(Protocol):
    """Implemented by `Routers`."""

    async def demands(self) -> dict[str, trace_pb2.RouterDemand]:
        """Demand by router, for the routers that answered."""
        ...


class _Model:
    """The autoscaler's state for one model."""

    def __init__(self, spec: ClusterSpec, model: ResolvedModel, pools: ModelSpec, now_s: float) -> None:
        """`pools`: the model's entry in the current spec, which may differ from `model.spec` after `tandem apply`."""
        self.resolved = model
        self.policy = Autoscaler(
            spec.autoscaler, ScalingLimits.of(spec.autoscaler, pools), Objectives.of(spec.router.classes)
        )
        self.load = ObservedLoad(now_s)
        bounds_steps = pools.engine_of(Role.DECODE).longest_step_s is not None
        self.local = LocalPrompts.of(spec.router, bounds_steps=bounds_steps)
        self.changed_s = now_s
        self.outlook = "not evaluated yet"


class Autoscaling:
    """Runs as a task while `autoscaler.enabled` is set."""

    def __init__(self, workers: Workers, scaler: PoolScaler, routers: DemandSource, spec: ClusterSpec) -> None:
        self._workers = workers
        self._scaler = scaler
        self._routers = routers
        self._task: asyncio.Task[None] | None = None
        self._reset(spec)

    def _reset(self, spec: ClusterSpec) -> None:
        self._cluster_spec = spec
        self._spec = spec.autoscaler
        self._models: list[_Model] = []
        self._decisions: deque[cluster_pb2.ScalingDecision] = deque(maxlen=KEPT_DECISIONS)
        self._counts = {action.value: 0 for action in ScalingAction if action is not ScalingAction.HOLD}

    async def configure(self, spec: ClusterSpec) -> None:
        """Restarts the loop with the autoscaler and pool settings of `spec`; earlier decisions are dropped."""
        await self.stop()
        self._reset(spec)
        if self._spec.enabled:
            self._task = asyncio.create_task(keep_running("autoscaler", self.run))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def status(self) -> cluster_pb2.Autoscaler:
        mode = ("dry_run" if self._spec.dry_run else "on") if self._spec.enabled else "off"
        mode = "external" if self._spec.external else mode
        return cluster_pb2.Autoscaler(
            mode=mode,
            decisions=reversed(self._decisions),
            outlooks=[
                cluster_pb2.ScalingOutlook(model=each.resolved.spec.served_name, words=each.outlook)
                for each in self._models
            ],
        )

    async def run(self) -> None:
        """Ends only when cancelled."""
        now_s, spec = asyncio.get_running_loop().time(), self._cluster_spec
        pairs = zip(self._workers.models, spec.models, strict=True)
        self._models = [_Model(spec, model, pools, now_s) for model, pools in pairs]
        self._workers.directory.set_autoscaler_decisions(self._counts)
        while True:
            await asyncio.sleep(self._spec.interval_s)
            for model in self._models:
                try:
                    await self._evaluate(model)
                except Exception:  # a failed evaluation must not stop the autoscaler
                    count_failure("autoscaler", f"{model.resolved.spec.served_name} could not be evaluated")

    async def _evaluate(self, model: _Model) -> None:
        if self._scaler.is_busy:
            model.outlook = "waiting for a running change of the pools"
            return
        view = await self._view(model)
        if view is None:
            model.outlook = "no router answers"
            return
        if not view.sizes.decode:
            model.outlook = "there is no decode worker"
            return
        now_s = asyncio.get_running_loop().time()
        decision = model.policy.decide(view, now_s)
        model.outlook = decision.reason
        if decision.action is not ScalingAction.HOLD:
            await self._act(model, decision)

    async def _view(self, model: _Model) -> PoolObservation | None:
        """None if no router answers."""
        name = model.resolved.spec.served_name
        reports = await self._routers.demands()
        if not reports:
            return None
        by_router = {router: (each.life, demand_of(each, name)) for router, each in reports.items()}
        now_s = asyncio.get_running_loop().time()
        model.load.note(by_router, now_s)
        slots = self._workers.slots_of(model.resolved)
        states = await asyncio.gather(*(self._workers.state(slot) for slot in slots))
        loads: Mapping[Role, list[worker_pb2.WorkerLoad]] = {role: [] for role in Role}
        for slot, state in zip(slots, states, strict=True):
            if state is not None:
                loads[slot.role].append(state.load)
        engine = model.resolved.spec.engine_of(Role.DECODE)
        blocks = min((each.blocks.total for each in loads[Role.DECODE] if each.blocks.total), default=1)
        return PoolObservation(
            PoolSizes(*(sum(slot.role is role for slot in slots) for role in (Role.PREFILL, Role.DECODE))),
            model.load.load(loads[Role.PREFILL], loads[Role.DECODE]),
            model.load.capability(engine.max_running_requests, blocks * engine.block_tokens, model.local),
            model.load.measured(model.changed_s + SETTLE_S),
        )

    async def _act(self, model: _Model, decision: ScalingDecision) -> None:
        name = model.resolved.spec.served_name
        record = cluster_pb2.ScalingDecision(
            at_unix_s=time.time(),
            model=name,
            action=decision.action.value,
            prefill=decision.target.prefill,
            decode=decision.target.decode,
            reason=decision.reason,
            outcome=DRY_RUN if self._spec.dry_run else UNDER_WAY,
        )
        self._decisions.append(record)
        self._counts[decision.action.value] += 1
        self._workers.directory.set_autoscaler_decisions(self._counts)
        log.info("autoscaler%s: %s: %s", " (dry run)" if self._spec.dry_run else "", name, decision.reason)
        if not self._spec.dry_run:
            record.outcome = await self._scale(name, decision.target)
        now_s = model.changed_s = asyncio.get_running_loop().time()
        if record.outcome in (DONE, DRY_RUN):
            model.policy.changed(decision, now_s)
        else:
            log.warning("autoscaler: %s: %s failed: %s", name, decision.action.value, record.outcome)
            model.policy.refused(decision, now_s)

    async def _scale(self, name: str, sizes: PoolSizes) -> str:
        """The outcome: DONE, or the error's message."""
        try:
            await self._scaler.scale(name, sizes.prefill, sizes.decode)
        except TandemError as error:
            return error.message
        return DONE


def demand_of(report: trace_pb2.RouterDemand, model: str) -> trace_pb2.ModelDemand:
    """All zero for a model without requests so far."""
    return next((each for each in report.models if each.model == model), trace_pb2.ModelDemand(model=model))
