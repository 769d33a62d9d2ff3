"""The admin gRPC service, `tandem.v1.Cluster`, on `control.admin_port`. Listens on loopback by default."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, cast

import grpc.aio

from cluster.control.apply import SpecApplier
from cluster.control.rolling_restart import RollingRestart
from cluster.control.routers import Routers
from cluster.control.scaling.pool_scaler import PoolScaler
from cluster.control.status_report import StatusReport
from cluster.control.workers import Workers
from router.auth.grpc_gate import source_of
from router.edge.limits.grpc import GuardedServer
from tandem.config.auth import is_loopback
from tandem.errors import ErrorCode, TandemError
from tandem.rpc.grpc_errors import abort
from tandem.rpc.identity import Identity
from tandem.rpc.versions import CONTROL_BEFORE_RANGES, CONTROL_VERSIONS, common_version, stated_versions
from tandem.telemetry.audit import AuditLine, AuditLog, utc_now
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2

SERVICE = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
READERS = frozenset({Identity.ADMIN, Identity.CONTROLLER, Identity.ROUTER})
ADMINS = frozenset({Identity.ADMIN, Identity.CONTROLLER})
ALLOWED: dict[str, frozenset[Identity]] = {
    f"/{SERVICE}/{method}": identities
    for method, identities in {
        "Register": frozenset({Identity.WORKER}),
        "WatchDirectory": READERS | {Identity.WORKER},
        "JoinRouter": frozenset({Identity.ROUTER}),
        "GetModelFiles": frozenset({Identity.ROUTER}),
        "GetStatus": READERS,
        "GetTrace": ADMINS,
        "ListTraces": ADMINS,
        "ListSnapshots": ADMINS,
        "RecordRequests": ADMINS,
        "Scale": ADMINS,
        "DrainWorker": ADMINS,
        "RestartWorkers": ADMINS,
        "GetRestart": ADMINS,
        "Apply": ADMINS,
        "Shutdown": ADMINS,
    }.items()
}
"""Identities that may call each method if `security.tls` is set. A method that is not listed is refused."""

Context = grpc.aio.ServicerContext[Any, Any]
MAX_CALLS = 4096  # each worker and router holds one WatchDirectory call open
CLIENT_TIMEOUT_S = 30.0
AUDIT_WAIT_S = 5.0  # for the line of a call, if the log is lossless: then the call is answered, and the line waits on
MAX_DETAILS_CHARS = 1000


class AdminService(cluster_pb2_grpc.ClusterServicer):
    """`stop_requested` is set when `tandem` asks for a shutdown. `audit`, if set, gets a line for each call that asks
    for a change."""

    def __init__(
        self,
        *,
        workers: Workers,
        routers: Routers,
        scaler: PoolScaler,
        restart: RollingRestart,
        applier: SpecApplier,
        status: StatusReport,
        stop_requested: asyncio.Event,
    ) -> None:
        self._workers = workers
        self._routers = routers
        self._scaler = scaler
        self._restart = restart
        self._applier = applier
        self._status = status
        self._stop_requested = stop_requested
        self.audit: AuditLog | None = None

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

    async def JoinRouter(
        self, request: cluster_pb2.JoinRouterRequest, context: Context
    ) -> AsyncIterator[cluster_pb2.RouterSettings]:
        try:
            async with aclosing(self._routers.joined.follow(request)) as settings:
                async for each in settings:
                    yield each
        except TandemError as error:
            await abort(context, error)

    async def GetModelFiles(
        self, request: cluster_pb2.GetModelFilesRequest, context: Context
    ) -> AsyncIterator[cluster_pb2.ModelFilePart]:
        try:
            for part in self._routers.model_files(request.model):
                yield part
        except TandemError as error:
            await abort(context, error)

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
        asked = f"prefill {'as is' if prefill is None else prefill}, decode {'as is' if decode is None else decode}"
        async with self._audited(context, "Scale", [asked], request.model) as details:
            actions = await self._scaler.scale(request.model, prefill, decode)
            details += actions
        return cluster_pb2.ScaleResponse(actions=actions)

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: Context
    ) -> cluster_pb2.DrainWorkerResponse:
        asked = [request.worker_id, "restart" if request.restart else "remove"]
        async with self._audited(context, "DrainWorker", asked):
            await self._scaler.drain(request.worker_id, restart=request.restart, move=not request.wait_for_ends)
        return cluster_pb2.DrainWorkerResponse()

    async def RestartWorkers(
        self, request: cluster_pb2.RestartWorkersRequest, context: Context
    ) -> cluster_pb2.RollingRestart:
        asked = ["wait for ends"] if request.wait_for_ends else []
        asked += ["routers"] if request.routers else []
        async with self._audited(context, "RestartWorkers", asked, request.model):
            await self._restart.begin(request.model, move=not request.wait_for_ends, routers=request.routers)
        return self._restart.status()

    async def GetRestart(self, request: cluster_pb2.GetRestartRequest, context: Context) -> cluster_pb2.RollingRestart:
        return self._restart.status()

    async def Apply(self, request: cluster_pb2.ApplyRequest, context: Context) -> cluster_pb2.ApplyResponse:
        async with self._audited(context, "Apply", ["dry run"] if request.dry_run else []) as details:
            changes = await self._applier.apply(request.spec, dry_run=request.dry_run)
            details += changes
        return cluster_pb2.ApplyResponse(changes=changes)

    async def Shutdown(self, request: cluster_pb2.ShutdownRequest, context: Context) -> cluster_pb2.ShutdownResponse:
        async with self._audited(context, "Shutdown", []):
            self._stop_requested.set()
        return cluster_pb2.ShutdownResponse()

    def refused(self, method: str, context: Context) -> None:
        """The caller's certificate is not of a role that may call the method."""
        if self.audit is not None:
            name = method.removeprefix(f"/{SERVICE}/")
            self.audit.write(_line(context, name, "", [], ErrorCode.PERMISSION_DENIED, 0.0))

    @asynccontextmanager
    async def _audited(
        self, context: Context, method: str, details: list[str], model: str = ""
    ) -> AsyncIterator[list[str]]:
        """Aborts the call with a TandemError of its body, and writes its line. `details` may grow in the body."""
        if self.audit is None:
            try:
                yield details
            except TandemError as error:
                await abort(context, error)
            return
        try:
            self.audit.require_room()
        except TandemError as error:
            await abort(context, error)  # without a line: there is no room for one
        began_s, refusal, code = time.monotonic(), None, None
        try:
            yield details
        except TandemError as error:
            refusal, code = error, error.code
        except asyncio.CancelledError:
            code = ErrorCode.CANCELLED
            raise
        except Exception:
            code = ErrorCode.INTERNAL
            raise
        finally:
            line = _line(context, method, model, details, code, time.monotonic() - began_s)
            await _written(self.audit, line)
        if refusal is not None:
            await abort(context, refusal)


async def _written(audit: AuditLog, line: AuditLine) -> None:
    """Returns when the line is written, if the log is lossless, but after AUDIT_WAIT_S in any case."""
    written, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_written() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(written.set)

    audit.write(line, on_written)
    if audit.is_lossless:
        with suppress(TimeoutError):
            async with asyncio.timeout(AUDIT_WAIT_S):
                await written.wait()


def _line(
    context: Context, method: str, model: str, details: list[str], code: ErrorCode | None, duration_s: float
) -> AuditLine:
    source = source_of(context)
    shown = (context.auth_context() or {}).get("peer_uri", ())
    names = ", ".join(sorted(name.decode("utf-8", "replace") for name in shown))
    return AuditLine(
        time=utc_now(),
        request_id="",
        trace_id="",
        key_id=names or ("local" if is_loopback(source) else ""),
        tenant="",
        source=source,
        method=f"/{SERVICE}/{method}",
        model=model,
        outcome="ok" if code is None else "cancelled" if code is ErrorCode.CANCELLED else "rejected",
        code=None if code is None else code.value,
        prompt_tokens=0,
        completion_tokens=0,
        duration_s=round(duration_s, 6),
        details="; ".join(details)[:MAX_DETAILS_CHARS],
    )
