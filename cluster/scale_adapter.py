"""Gives the pools of a cluster the sizes that its Pool objects (pools.tandem.dev) ask for, so that `kubectl scale`, a
HorizontalPodAutoscaler or KEDA can drive them. The chart's Deployment (`scaleAdapter.enabled`) runs
`python -m cluster.scale_adapter`.

It compares what is asked with what is, again and again, and so needs no memory: it may be stopped at any moment.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cluster.cli.admin_client import TIMEOUT_S, Admin, NoController, controller_at
from cluster.kubernetes import Pool
from cluster.pod_arguments import add_pod_arguments, admin_of, kubernetes_of
from cluster.tasks import count_failure, keep_running
from planner.pool_forecast import PoolSizes
from tandem.config.model import Role
from tandem.errors import TandemError
from tandem.rpc.directory import ROLE_OF
from tandem.text.words import plural
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

log = logging.getLogger(__name__)

POLL_S = 2.0
SETTLE_S = 5.0
FIRST_RETRY_S, LAST_RETRY_S = 15.0, 300.0
# No pod has this label: a HorizontalPodAutoscaler refuses a selector that is empty or shared.
SELECTOR = "tandem.dev/pool"

PROBLEMS = ("NoSuchModel", "Duplicate", "Refused")

Answer = TypeVar("Answer")
Wanted = tuple[int | None, int | None]  # prefill and decode workers; None: as they are


class Pools(Protocol):
    """Implemented by `KubernetesApi`. All raise TandemError."""

    def pools(self) -> Sequence[Pool]: ...
    def set_replicas(self, pool: Pool, replicas: int) -> None: ...
    def set_status(self, pool: Pool, status: Mapping[str, Any]) -> None: ...


class Cluster(Protocol):
    """Implemented by `AdminCluster`. Both raise TandemError, and NoController if none answers."""

    async def status(self) -> cluster_pb2.ClusterStatus: ...
    async def scale(self, model: str, wanted: Wanted) -> None: ...


class AdminCluster:
    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def status(self) -> cluster_pb2.ClusterStatus:
        async with self._controller() as stub:
            return await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=TIMEOUT_S)

    async def scale(self, model: str, wanted: Wanted) -> None:
        prefill, decode = wanted
        async with self._controller() as stub:  # without a deadline: a worker may take long to start
            await stub.Scale(cluster_pb2.ScaleRequest(model=model, prefill=prefill, decode=decode))

    @asynccontextmanager
    async def _controller(self) -> AsyncIterator[cluster_pb2_grpc.ClusterAsyncStub]:
        """Its errors are read on a Pool, which has no flags."""
        try:
            async with controller_at(self._admin) as stub:
                yield stub
        except NoController:
            hint = "" if self._admin.tls is None else ", and does it accept this certificate (tls.internal)"
            raise NoController(
                f"no controller answers at {self._admin.address}: is the head pod ready{hint}?"
            ) from None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a Pool has its condition."""

    word: str
    message: str = ""


SCALED = Reason("Scaled")


class Demand:
    """What the Pools of one model ask for, and whether it is time to ask the controller. Pure."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._wanted: Wanted = (None, None)
        self._since_s = 0.0
        self.refusal = ""
        self._refused_at: PoolSizes | None = None  # the cluster's sizes then
        self._retry_s, self._delay_s = 0.0, 0.0

    def is_due(self, wanted: Wanted, asked: PoolSizes, now_s: float) -> bool:
        """`asked`: what the controller was last asked for. A size must stay for a moment, because two autoscalers see a
        shift of load at different moments: if one pool grows and the other shrinks, workers change roles."""
        if wanted != self._wanted:
            self._wanted, self._since_s = wanted, now_s
            self._forget()
        if all(want in (None, size) for want, size in zip(wanted, asked, strict=True)):
            self._forget()
            return False
        if self.refusal:
            self._refused_at = self._refused_at or asked
            if self._refused_at == asked:
                return now_s >= self._retry_s
            self._forget()
        return now_s >= self._since_s + self._settle_s

    def refused(self, message: str, now_s: float) -> None:
        self.refusal, self._refused_at = message, None
        self._delay_s = min(LAST_RETRY_S, 2 * self._delay_s or FIRST_RETRY_S)
        self._retry_s = now_s + self._delay_s

    def _forget(self) -> None:
        self.refusal, self._refused_at, self._delay_s = "", None, 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A call of the controller under way."""

    before: PoolSizes
    target: Wanted
    task: asyncio.Task[None]

    def concerns(self, role: Role) -> bool:
        index = 0 if role is Role.PREFILL else 1
        return self.target[index] not in (None, self.before[index])

    def is_obsolete(self, wanted: Wanted) -> bool:
        """It still starts workers that are no longer asked for: perhaps there never is room for them."""
        sizes = zip(self.before, self.target, wanted, strict=True)
        return any(
            target is not None and want is not None and before < target and want < target
            for before, target, want in sizes
        )


class ScaleAdapter:
    """`on_look()`: it has asked for the Pools. `on_round(True)`: Pools and cluster could be read, `on_round(False)`:
    not."""

    def __init__(
        self,
        pools: Pools,
        cluster: Cluster,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
        on_look: Callable[[], None] = lambda: None,
        on_round: Callable[[bool], None] = lambda could_read: None,
    ) -> None:
        self._pools = pools
        self._cluster = cluster
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._on_look = on_look
        self._on_round = on_round
        self._demands: dict[str, Demand] = {}
        self._changes: dict[str, Change] = {}
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Ends only when cancelled."""
        try:
            while True:
                self._on_round(await self._round())
                await asyncio.sleep(self._poll_s)
        finally:
            tasks = [change.task for change in self._changes.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self) -> bool:
        pools = await self._answer("Kubernetes", asyncio.to_thread(self._pools.pools))
        self._on_look()
        if pools is None:
            return False
        busy = set(self._changes)  # until a call ends, the status has the sizes it asks for, even if it is refused then
        status = await self._answer("controller", self._cluster.status())
        models = {} if status is None else {each.name: each for each in status.models}
        first: dict[tuple[str, Role], Pool] = {}
        for pool in sorted(pools, key=lambda pool: (pool.created, pool.name)):
            first.setdefault((pool.model, pool.role), pool)
        for name, model in models.items():
            prefill, decode = first.get((name, Role.PREFILL)), first.get((name, Role.DECODE))
            if model.decode and (prefill or decode):
                wanted = _replicas(prefill), _replicas(decode)
                self._follow(name, wanted, PoolSizes(model.prefill, model.decode), name in busy)
        busy |= self._changes.keys()
        for pool in pools:
            if status is None:
                await self._report(pool, {}, Reason("ControllerAway", self._said["controller"]))
            elif pool.model not in models:
                known = ", ".join(models)
                reason = Reason("NoSuchModel", f"spec.model: expected one of {known}, got {pool.model!r}")
                await self._report(pool, {"replicas": 0, "ready": 0}, reason)
            elif (other := first[pool.model, pool.role]) is not pool:
                reason = Reason(
                    "Duplicate", f"{other.name} is older and has the same model and role: delete one of them"
                )
                await self._report(pool, _counts(status, pool), reason)
            elif pool.model not in busy or pool.model in self._changes:  # else the status is of before the call's end
                await self._adopt(pool, models[pool.model])
                await self._report(pool, _counts(status, pool), self._reason(pool, models[pool.model]))
        return status is not None

    async def _adopt(self, pool: Pool, model: cluster_pb2.ModelStatus) -> None:
        """A Pool that names no size gets the present one: without, Kubernetes cannot scale it."""
        if pool.replicas is None and model.decode:
            replicas = _size(model, pool.role)
            await self._answer(f"{pool.name}'s spec", asyncio.to_thread(self._pools.set_replicas, pool, replicas))

    def _follow(self, model: str, wanted: Wanted, asked: PoolSizes, was_busy: bool) -> None:
        demand = self._demands.setdefault(model, Demand(self._settle_s))
        if (change := self._changes.get(model)) is not None:
            if change.is_obsolete(wanted):
                log.info("%s: %s are no longer asked for", model, _shown(change.target))
                change.task.cancel()
        elif not was_busy and demand.is_due(wanted, asked, asyncio.get_running_loop().time()):
            if not demand.refusal:
                log.info("%s: %s asked for", model, _shown(wanted))
            task = asyncio.create_task(self._scale(model, wanted, demand))
            self._changes[model] = Change(asked, wanted, task)
            task.add_done_callback(lambda _: self._changes.pop(model))

    async def _scale(self, model: str, wanted: Wanted, demand: Demand) -> None:
        try:
            await self._cluster.scale(model, wanted)
            log.info("%s: %s reached", model, _shown(wanted))
        except NoController as error:  # no refusal: it is asked again as soon as one answers
            log.warning("%s: %s", model, error.message)
        except TandemError as error:
            demand.refused(error.message, asyncio.get_running_loop().time())
        except Exception as error:
            count_failure("scale adapter", f"{model} could not be scaled")
            demand.refused(f"{type(error).__name__}: {error}", asyncio.get_running_loop().time())

    def _reason(self, pool: Pool, model: cluster_pb2.ModelStatus) -> Reason:
        if not model.decode:
            return Reason("Starting", "the cluster starts")
        demand, change = self._demands.get(pool.model), self._changes.get(pool.model)
        is_asked_for = pool.replicas in (None, _size(model, pool.role))
        if is_asked_for and (change is None or not change.concerns(pool.role)):
            return SCALED
        if demand is not None and demand.refusal:
            return Reason("Refused", demand.refusal)
        if change is not None:
            return Reason("Scaling", f"the controller is asked for {_shown(change.target)}")
        return Reason("Waiting", f"a size must stay for {self._settle_s:g} s")

    async def _report(self, pool: Pool, counts: Mapping[str, int], reason: Reason) -> None:
        if reason.word in PROBLEMS:
            self._say(f"Pool {pool.name}", f"{reason.word}: {reason.message}")
        else:
            self._said.pop(f"Pool {pool.name}", None)
        status = {**counts, "selector": f"{SELECTOR}={pool.uid}", "conditions": [_condition(pool, reason)]}
        if {**pool.status, **status} != pool.status:
            await self._answer(f"{pool.name}'s status", asyncio.to_thread(self._pools.set_status, pool, status))

    async def _answer(self, whose: str, call: Awaitable[Answer]) -> Answer | None:
        """None: there is none. The reason is logged once."""
        try:
            answer = await call
        except TandemError as error:
            self._say(whose, error.message)
            return None
        if self._said.pop(whose, None) is not None:
            log.info("%s: as it should be again", whose)
        return answer

    def _say(self, about: str, message: str) -> None:
        if self._said.get(about) != message:
            log.warning("%s: %s", about, message)
            self._said[about] = message


def _replicas(pool: Pool | None) -> int | None:
    return None if pool is None else pool.replicas


def _size(model: cluster_pb2.ModelStatus, role: Role) -> int:
    return model.prefill if role is Role.PREFILL else model.decode


def _counts(status: cluster_pb2.ClusterStatus, pool: Pool) -> dict[str, int]:
    """Of the workers that there are, which may be others than those asked for."""
    states = [
        worker.state
        for worker in status.workers
        if worker.info.model == pool.model and ROLE_OF[worker.info.role] is pool.role and worker.state != "failed"
    ]
    return {"replicas": len(states), "ready": states.count("ready")}


def _condition(pool: Pool, reason: Reason) -> dict[str, Any]:
    """With the time of the last change of its status, as Kubernetes has it."""
    state = "True" if reason is SCALED else "False"
    former: Mapping[str, Any] = next(
        (each for each in pool.status.get("conditions", ()) if each["type"] == "Scaled"), {}
    )
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "Scaled",
        "status": state,
        "reason": reason.word,
        "message": reason.message,
        "observedGeneration": pool.generation,
        "lastTransitionTime": former["lastTransitionTime"] if former.get("status") == state else now,
    }


def _shown(wanted: Wanted) -> str:
    named = zip(("prefill", "decode"), wanted, strict=True)
    return " and ".join(plural(count, f"{role} worker") for role, count in named if count is not None)


async def _until_signal(adapter: ScaleAdapter) -> None:
    running = asyncio.create_task(keep_running("scale adapter", adapter.run))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with suppress(asyncio.CancelledError):
        await running


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.scale_adapter", description="Scales pools as pools.tandem.dev objects ask for."
    )
    parser.add_argument("--settle", type=float, default=SETTLE_S, metavar="SECONDS", help="that a size must hold for")
    parser.add_argument("--poll", type=float, default=POLL_S, metavar="SECONDS", help="between two looks")
    parser.add_argument("--probes", type=Path, metavar="FOLDER", help="for `alive`, touched each time, and `ready`")
    add_pod_arguments(parser)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

    def touch(name: str) -> None:
        if given.probes is not None:
            (given.probes / name).touch()

    try:
        cluster = AdminCluster(admin_of(given))
        adapter = ScaleAdapter(
            kubernetes_of(given),
            cluster,
            given.poll,
            given.settle,
            on_look=lambda: touch("alive"),
            on_round=lambda could_read: touch("ready") if could_read else None,
        )
    except TandemError as error:
        print(error.message, file=sys.stderr)
        return 1
    asyncio.run(_until_signal(adapter))
    return 0


if __name__ == "__main__":
    sys.exit(main())
