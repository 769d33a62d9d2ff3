"""The admin gRPC service, `tandem.v1.Cluster`, on `control.admin_port`. Listens on loopback by default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import grpc.aio

from cluster.control.apply import SpecApplier
from cluster.control.pool_scaler import PoolScaler
from cluster.control.routers import Routers
from cluster.control.status_report import StatusReport
from cluster.control.workers import Workers
from router.edge.limits.grpc import GuardedServer
from tandem.errors import TandemError
from tandem.rpc.grpc_errors import abort
from tandem.rpc.identity import Identity
from tandem.rpc.versions import CONTROL_BEFORE_RANGES, CONTROL_VERSIONS, common_version, stated_versions
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2

READERS = frozenset({Identity.ADMIN, Identity.CONTROLLER, Identity.ROUTER})
ADMINS = frozenset({Identity.ADMIN, Identity.CONTROLLER})
ALLOWED: dict[str, frozenset[Identity]] = {
    f"/{cluster_pb2.DESCRIPTOR.services_by_name['Cluster'].full_name}/{method}": identities
    for method, identities in {
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
"""Identities that may call each method if `security.tls` is set. A method that is not listed is refused."""

Context = grpc.aio.ServicerContext[Any, Any]
MAX_CALLS = 4096  # each worker and router holds one WatchDirectory call open
CLIENT_TIMEOUT_S = 30.0


class AdminService(cluster_pb2_grpc.ClusterServicer):
    """`stop_requested` is set when `tandem` asks for a shutdown."""

    def __init__(
        self,
        *,
        workers: Workers,
        routers: Routers,
        scaler: PoolScaler,
        applier: SpecApplier,
        status: StatusReport,
        stop_requested: asyncio.Event,
    ) -> None:
        self._workers = workers
        self._routers = routers
        self._scaler = scaler
        self._applier = applier
        self._status = status
        self._stop_requested = stop_requested

    def add_to(self, server: grpc.aio.Server) -> None:
        guarded = cast(grpc.aio.Server, GuardedServer(server, MAX_CALLS, CLIENT_TIMEOUT_S))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, guarded)

    async def Register(self, request: cluster_pb2.RegisterRequest, context: Context) -> cluster_pb2.RegisterResponse:
        try:
            self._workers.register(request.worker, stated_versions(request, CONTROL_BEFORE_RANGES))
        except TandemError as error:
            await abort(context, error)
        ours = CONTROL_VERSIONS
        return cluster_pb2.RegisterResponse(protocol=ours.protocol, oldest_protocol=ours.oldest_protocol)

    async def WatchDirectory(
        self, request: cluster_pb2.WatchDirectoryRequest, context: Context
    ) -> AsyncIterator[cluster_pb2.Directory]:
        ours, theirs = CONTROL_VERSIONS, stated_versions(request, CONTROL_BEFORE_RANGES)
        try:
            common_version(ours, theirs, ("the controller", request.watcher))
        except TandemError as error:
            await abort(context, error)
        async for directory in self._workers.directory.follow(takes_changes=request.takes_changes):
            directory.protocol, directory.oldest_protocol = ours.protocol, ours.oldest_protocol
            yield directory

    async def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Context) -> cluster_pb2.ClusterStatus:
        return await self._status.build()

    async def GetTrace(self, request: trace_pb2.GetTraceRequest, context: Context) -> trace_pb2.RequestTrace:
        try:
            return await self._routers.traces.get(request)
        except TandemError as error:
            await abort(context, error)

    async def ListTraces(self, request: trace_pb2.ListTracesRequest, context: Context) -> trace_pb2.ListTracesResponse:
        try:
            return await self._routers.traces.list(request)
        except TandemError as error:
            await abort(context, error)

    async def RecordRequests(
        self, request: trace_pb2.RecordRequestsRequest, context: Context
    ) -> AsyncIterator[trace_pb2.LoggedRequest]:
        try:
            async with aclosing(self._routers.traces.record(request)) as logged:
                async for each in logged:
                    yield each
        except TandemError as error:
            await abort(context, error)

    async def ListSnapshots(
        self, request: cluster_pb2.ListSnapshotsRequest, context: Context
    ) -> cluster_pb2.ListSnapshotsResponse:
        try:
            return await self._routers.traces.snapshots()
        except TandemError as error:
            await abort(context, error)

    async def Scale(self, request: cluster_pb2.ScaleRequest, context: Context) -> cluster_pb2.ScaleResponse:
        prefill = request.prefill if request.HasField("prefill") else None
        decode = request.decode if request.HasField("decode") else None
        try:
            actions = await self._scaler.scale(request.model, prefill, decode)
        except TandemError as error:
            await abort(context, error)
        return cluster_pb2.ScaleResponse(actions=actions)

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: Context
    ) -> cluster_pb2.DrainWorkerResponse:
        try:
            await self._scaler.drain(request.worker_id, restart=request.restart, move=not request.wait_for_ends)
        except TandemError as error:
            await abort(context, error)
        return cluster_pb2.DrainWorkerResponse()

    async def Apply(self, request: cluster_pb2.ApplyRequest, context: Context) -> cluster_pb2.ApplyResponse:
        try:
            changes = await self._applier.apply(request.spec, dry_run=request.dry_run)
        except TandemError as error:
            await abort(context, error)
        return cluster_pb2.ApplyResponse(changes=changes)

    async def Shutdown(self, request: cluster_pb2.ShutdownRequest, context: Context) -> cluster_pb2.ShutdownResponse:
        self._stop_requested.set()
        return cluster_pb2.ShutdownResponse()
