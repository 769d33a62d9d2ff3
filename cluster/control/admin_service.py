"""The admin gRPC service: `tandem.v1.Cluster`. Loopback by default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import grpc.aio

from cluster.control.pool_scaler import ROLES
from cluster.control.router_slot import RouterState
from cluster.control.worker_slot import WorkerSlot, WorkerState
from router.edge.limits.grpc import GuardedServer
from tandem.config.spec import Role
from tandem.errors import TandemError
from tandem.rpc.grpc_errors import abort
from tandem.rpc.identity import Identity
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2
from tandem.version import tandem_version

if TYPE_CHECKING:
    from cluster.control.controller import Controller

READERS = frozenset({Identity.ADMIN, Identity.CONTROLLER, Identity.ROUTER})
ADMINS = frozenset({Identity.ADMIN, Identity.CONTROLLER})
ALLOWED: dict[str, frozenset[Identity]] = {
    f"/{cluster_pb2.DESCRIPTOR.services_by_name['Cluster'].full_name}/{method}": who
    for method, who in {
        "Register": frozenset({Identity.WORKER}),
        "WatchDirectory": READERS | {Identity.WORKER},
        "GetStatus": READERS,
        "GetTrace": ADMINS,
        "ListTraces": ADMINS,
        "ListSnapshots": ADMINS,
        "RecordRequests": ADMINS,
        "Scale": ADMINS,
        "DrainWorker": ADMINS,
        "Apply": ADMINS,
        "Shutdown": ADMINS,
    }.items()
}
"""Who may call what where `security.tls` tells callers apart. A method that is not here, nobody may."""

Context = grpc.aio.ServicerContext[Any, Any]
MAX_CALLS = 4096  # each worker and router follows the directory with one
CLIENT_TIMEOUT_S = 30.0


class AdminService(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def add_to(self, server: grpc.aio.Server) -> None:
        guarded = cast(grpc.aio.Server, GuardedServer(server, MAX_CALLS, CLIENT_TIMEOUT_S))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, guarded)

    async def Register(self, request: cluster_pb2.RegisterRequest, context: Context) -> cluster_pb2.RegisterResponse:
        try:
            self._controller.register(request.worker)
        except TandemError as error:
            await abort(context, error)
        return cluster_pb2.RegisterResponse()

    async def WatchDirectory(
        self, request: cluster_pb2.WatchDirectoryRequest, context: Context
    ) -> AsyncIterator[cluster_pb2.Directory]:
        async for directory in self._controller.directory.follow():
            yield directory

    async def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Context) -> cluster_pb2.ClusterStatus:
        controller = self._controller
        slots = sorted(controller.slots.values(), key=lambda slot: slot.worker_id)
        workers, routers, processes, redis = await asyncio.gather(
            asyncio.gather(*(self._worker(slot) for slot in slots)),
            asyncio.gather(*(router.status() for router in controller.routers)),
            controller.own_processes(),
            controller.redis_state(),
        )
        without_ended_links(workers)
        return cluster_pb2.ClusterStatus(
            cluster=controller.spec.name,
            version=tandem_version(),
            backend=controller.backend.name,
            http_address=controller.http_address,
            grpc_address=controller.grpc_address,
            http_scheme="http" if controller.spec.router.tls is None else "https",
            log_dir=str(controller.log_dir),
            redis=redis,
            workers=workers,
            processes=[cluster_pb2.Process(name=process.name, pid=process.pid) for process in processes],
            router_ready=bool(routers) and all(router.state is RouterState.READY for router in routers),
            autoscaler=controller.autoscaling.status(),
            routers=[
                cluster_pb2.RouterStatus(
                    router_id=router.name,
                    state=router.state.value,
                    restarts=router.restarts,
                    http_address=router.http_address,
                    grpc_address=router.grpc_address,
                )
                for router in routers
            ],
        )

    async def _worker(self, slot: WorkerSlot) -> cluster_pb2.WorkerStatus:
        info = cluster_pb2.WorkerInfo()
        if slot.info is not None:
            info.CopyFrom(slot.info)
        info.worker_id, info.epoch, info.role = slot.worker_id, slot.epoch, ROLES[slot.role]
        info.model = slot.model.spec.served_name
        info.layout.tp = (slot.model.spec.prefill if slot.role is Role.PREFILL else slot.model.spec.decode).tp
        live, processes = await asyncio.gather(self._controller.worker_state(slot), slot.processes())
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

    async def GetTrace(self, request: trace_pb2.GetTraceRequest, context: Context) -> trace_pb2.RequestTrace:
        try:
            return await self._controller.traces.get(request)
        except TandemError as error:
            await abort(context, error)

    async def ListTraces(self, request: trace_pb2.ListTracesRequest, context: Context) -> trace_pb2.ListTracesResponse:
        try:
            return await self._controller.traces.list(request)
        except TandemError as error:
            await abort(context, error)

    async def RecordRequests(
        self, request: trace_pb2.RecordRequestsRequest, context: Context
    ) -> AsyncIterator[trace_pb2.LoggedRequest]:
        try:
            async with aclosing(self._controller.traces.record(request)) as logged:
                async for each in logged:
                    yield each
        except TandemError as error:
            await abort(context, error)

    async def ListSnapshots(
        self, request: cluster_pb2.ListSnapshotsRequest, context: Context
    ) -> cluster_pb2.ListSnapshotsResponse:
        try:
            return await self._controller.traces.snapshots()
        except TandemError as error:
            await abort(context, error)

    async def Scale(self, request: cluster_pb2.ScaleRequest, context: Context) -> cluster_pb2.ScaleResponse:
        prefill = request.prefill if request.HasField("prefill") else None
        decode = request.decode if request.HasField("decode") else None
        try:
            actions = await self._controller.live_ratio.scale(request.model, prefill, decode)
        except TandemError as error:
            await abort(context, error)
        return cluster_pb2.ScaleResponse(actions=actions)

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: Context
    ) -> cluster_pb2.DrainWorkerResponse:
        try:
            await self._controller.live_ratio.drain(
                request.worker_id, restart=request.restart, move=not request.wait_for_ends
            )
        except TandemError as error:
            await abort(context, error)
        return cluster_pb2.DrainWorkerResponse()

    async def Apply(self, request: cluster_pb2.ApplyRequest, context: Context) -> cluster_pb2.ApplyResponse:
        try:
            changes = await self._controller.apply.apply(request.spec, dry_run=request.dry_run)
        except TandemError as error:
            await abort(context, error)
        return cluster_pb2.ApplyResponse(changes=changes)

    async def Shutdown(self, request: cluster_pb2.ShutdownRequest, context: Context) -> cluster_pb2.ShutdownResponse:
        self._controller.stop_requested.set()
        return cluster_pb2.ShutdownResponse()


def without_ended_links(workers: Sequence[cluster_pb2.WorkerStatus]) -> None:
    """Takes out what is left of links that nobody wants any more: the other end left the cluster, or since a change of
    roles both are in one pool."""
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
