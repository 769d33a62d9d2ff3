"""The answer to `tandem status`: every worker, router and process of the cluster, as a protobuf message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from cluster.control.record import WorkerState
from cluster.control.redis import Redis
from cluster.control.router_slot import RouterState
from cluster.control.routers import Routers
from cluster.control.scaling.autoscaling import Autoscaling
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.worker_slot import WorkerSlot
from cluster.control.workers import Workers
from cluster.keeper.members import RunningProcess
from cluster.spec.resolve import ResolvedModel
from cluster.tasks import task_failures
from tandem.config.observability import LogTarget
from tandem.config.spec import ClusterSpec
from tandem.rpc.directory import WIRE_ROLE
from tandem.v1 import cluster_pb2
from tandem.version import tandem_version

ANSWER_S = 3.0


class StatusReport:
    def __init__(
        self,
        spec: ClusterSpec,
        backend_name: str,
        log_dir: Path,
        *,
        workers: Workers,
        routers: Routers,
        redis: Redis,
        scaler: PoolScaler,
        autoscaling: Autoscaling,
    ) -> None:
        self._spec = spec
        self._backend_name = backend_name
        self._log_dir = log_dir
        self._workers = workers
        self._routers = routers
        self._redis = redis
        self._scaler = scaler
        self._autoscaling = autoscaling

    async def build(self) -> cluster_pb2.ClusterStatus:
        slots = sorted(self._workers.slots.values(), key=lambda slot: slot.worker_id)
        workers, routers, router_processes, redis_processes, redis = await asyncio.gather(
            asyncio.gather(*(self._worker(slot) for slot in slots)),
            self._routers.status(),
            _in_time(self._routers.processes),
            self._redis.processes(),
            self._redis.state(),
        )
        drop_stale_links(workers)
        first_http, first_grpc = next(iter(self._routers.addresses), ("", ""))
        return cluster_pb2.ClusterStatus(
            cluster=self._spec.name,
            version=tandem_version(),
            backend=self._backend_name,
            http_address=first_http,
            grpc_address=first_grpc,
            http_scheme="http" if self._spec.router.tls is None else "https",
            log_dir=str(self._log_dir) if self._spec.observability.logs.target is LogTarget.FILES else "",
            redis=redis,
            workers=workers,
            processes=[
                cluster_pb2.Process(name=process.name, pid=process.pid)
                for process in (*redis_processes, *router_processes)
            ],
            router_ready=bool(routers) and all(router.state is RouterState.READY for router in routers),
            autoscaler=self._autoscaling.status(),
            task_failures=task_failures,
            models=[self._model(model) for model in self._workers.models],
            local_prefill_max_tokens=self._routers.settings.local_prefill_max_tokens,
            routers=[
                cluster_pb2.RouterStatus(
                    router_id=router.name,
                    state=router.state.value,
                    restarts=router.restarts,
                    http_address=router.http_address,
                    grpc_address=router.grpc_address,
                    has_joined=router.has_joined,
                )
                for router in routers
            ],
        )

    def _model(self, model: ResolvedModel) -> cluster_pb2.ModelStatus:
        tools, reasoning = model.formats.names
        prefill, decode = self._scaler.asked_sizes(model)
        return cluster_pb2.ModelStatus(
            name=model.spec.served_name,
            tool_parser=tools,
            reasoning_parser=reasoning,
            prefill=prefill,
            decode=decode,
            adapters=[
                each for each in self._workers.directory.listed_adapters() if each.model == model.spec.served_name
            ],
        )

    async def _worker(self, slot: WorkerSlot) -> cluster_pb2.WorkerStatus:
        info = cluster_pb2.WorkerInfo()
        if slot.info is not None:
            info.CopyFrom(slot.info)
        info.worker_id, info.epoch, info.role = slot.worker_id, slot.epoch, WIRE_ROLE[slot.role]
        info.model = slot.model.spec.served_name
        info.layout.tp = slot.pool.tp
        live, processes = await asyncio.gather(self._workers.state(slot), _in_time(slot.processes))
        del info.processes[:]
        for process in processes:
            info.processes.add(name=process.name, pid=process.pid)
        unreachable = slot.state is WorkerState.READY and live is None
        status = cluster_pb2.WorkerStatus(
            info=info,
            state=_shown_state(slot, unreachable=unreachable),
            reason=slot.reason,
            restarts=slot.restarts,
        )
        if live is not None:
            status.live.CopyFrom(live)
        return status


async def _in_time(processes: Callable[[], Awaitable[list[RunningProcess]]]) -> list[RunningProcess]:
    """Empty if a host does not answer: the status must still tell about the others."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await processes()
    except TimeoutError:
        return []


def drop_stale_links(workers: Sequence[cluster_pb2.WorkerStatus]) -> None:
    """Removes links that are down for good: the peer left the cluster, or a role change put both ends in one pool."""
    pools = {each.info.worker_id: (each.info.model, each.info.role) for each in workers}
    for worker in workers:
        links = worker.live.links if worker.HasField("live") else []
        pool = pools[worker.info.worker_id]
        wanted = [link for link in links if link.state != "down" or pools.get(link.peer_worker, pool) != pool]
        if len(wanted) < len(links):
            del worker.live.links[:]
            worker.live.links.extend(wanted)


def _shown_state(slot: WorkerSlot, *, unreachable: bool) -> str:
    if unreachable:
        return "unreachable"
    draining = slot.state is WorkerState.READY and slot.drain != cluster_pb2.DRAIN_NONE
    return "draining" if draining else slot.state.value
