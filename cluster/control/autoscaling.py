"""Looks at the pools every few seconds, asks the policy (planner/autoscaler.py), and does what it says by the same way
as `tandem scale`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster.control.observed_load import ObservedLoad
from cluster.spec.resolve import ResolvedModel
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
from tandem.config.spec import ClusterSpec, ModelSpec, Role
from tandem.errors import TandemError
from tandem.v1 import cluster_pb2, trace_pb2, worker_pb2

if TYPE_CHECKING:
    from cluster.control.controller import Controller

log = logging.getLogger(__name__)

KEPT_DECISIONS = 20
DONE, DRY_RUN, UNDER_WAY = "done", "dry_run", "under_way"


class _Model:
    """What is kept of one model."""

    def __init__(self, spec: ClusterSpec, model: ResolvedModel, pools: ModelSpec, now_s: float) -> None:
        """`pools`: the model's, as the spec asks for them now."""
        self.resolved = model
        self.policy = Autoscaler(
            spec.autoscaler, ScalingLimits.of(spec.autoscaler, pools), Objectives.of(spec.router.classes)
        )
        self.load = ObservedLoad(now_s)
        self.local = LocalPrompts.of(spec.router)
        self.changed_s = now_s
        self.words = "not looked yet"


class Autoscaling:
    """`run` ends only when it is cancelled; without `autoscaler.enabled` it is not called."""

    def __init__(self, controller: Controller, spec: ClusterSpec) -> None:
        self._controller = controller
        self._cluster_spec = spec
        self._spec = spec.autoscaler
        self._models: list[_Model] = []
        self._decisions: deque[cluster_pb2.ScalingDecision] = deque(maxlen=KEPT_DECISIONS)
        self._counts = {action.value: 0 for action in ScalingAction if action is not ScalingAction.HOLD}

    def status(self) -> cluster_pb2.Autoscaler:
        mode = ("dry_run" if self._spec.dry_run else "on") if self._spec.enabled else "off"
        return cluster_pb2.Autoscaler(
            mode=mode,
            decisions=reversed(self._decisions),
            outlooks=[
                cluster_pb2.ScalingOutlook(model=each.resolved.spec.served_name, words=each.words)
                for each in self._models
            ],
        )

    async def run(self) -> None:
        now_s, spec = asyncio.get_running_loop().time(), self._cluster_spec
        pairs = zip(self._controller.models, spec.models, strict=True)
        self._models = [_Model(spec, model, pools, now_s) for model, pools in pairs]
        self._controller.directory.set_autoscaler_decisions(self._counts)
        while True:
            await asyncio.sleep(self._spec.interval_s)
            for model in self._models:
                try:
                    await self._look(model)
                except Exception:  # a fault of ours in one look must not end the looking
                    log.exception("autoscaler: %s could not be looked at", model.resolved.spec.served_name)

    async def _look(self, model: _Model) -> None:
        if self._controller.live_ratio.is_busy:
            model.words = "waits for a change that is under way"
            return
        view = await self._view(model)
        if view is None:
            model.words = "no router answers"
            return
        if not view.sizes.decode:
            model.words = "there is no decode worker"
            return
        now_s = asyncio.get_running_loop().time()
        decision = model.policy.decide(view, now_s)
        model.words = decision.reason
        if decision.action is not ScalingAction.HOLD:
            await self._act(model, decision)

    async def _view(self, model: _Model) -> PoolObservation | None:
        controller, name = self._controller, model.resolved.spec.served_name
        reports = await controller.traces.demands()
        if not reports:
            return None
        by_router = {router: (each.life, demand_of(each, name)) for router, each in reports.items()}
        now_s = asyncio.get_running_loop().time()
        model.load.note(by_router, now_s)
        slots = [slot for slot in controller.slots.values() if slot.model is model.resolved and not slot.is_given_up]
        states = await asyncio.gather(*(controller.worker_state(slot) for slot in slots))
        loads: Mapping[Role, list[worker_pb2.WorkerLoad]] = {role: [] for role in Role}
        for slot, state in zip(slots, states, strict=True):
            if state is not None:
                loads[slot.role].append(state.load)
        engine = model.resolved.spec.engine
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
        self._controller.directory.set_autoscaler_decisions(self._counts)
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
        """How it went."""
        try:
            await self._controller.live_ratio.scale(name, sizes.prefill, sizes.decode)
        except TandemError as error:
            return error.message
        return DONE


def demand_of(report: trace_pb2.RouterDemand, model: str) -> trace_pb2.ModelDemand:
    """All zero for a model that nobody asked for yet."""
    return next((each for each in report.models if each.model == model), trace_pb2.ModelDemand(model=model))
