"""A stub controller with the one service that routers follow: the directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from router.testing.stub_worker import StubWorker
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.v1 import cluster_pb2, trace_pb2
from tandem.v1.cluster_pb2_grpc import ClusterServicer, add_ClusterServicer_to_server


class StubController(ClusterServicer):
    """Serves the directory that a test sets."""

    def __init__(self) -> None:
        self.address = ""
        self.places: list[cluster_pb2.WorkerPlace] = []  # sent with the next change
        self.adapters: list[cluster_pb2.ModelAdapter] = []  # likewise
        self._workers: list[cluster_pb2.WorkerInfo] = []
        self._version = 0
        self._changed = asyncio.Condition()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)

    async def start(self, port: int = 0) -> None:
        add_ClusterServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def set_workers(self, *workers: StubWorker) -> None:
        await self.set_infos([worker.info() for worker in workers])

    async def set_infos(self, infos: Sequence[cluster_pb2.WorkerInfo]) -> None:
        async with self._changed:
            self._workers = list(infos)
            self._version += 1
            self._changed.notify_all()

    async def WatchDirectory(
        self, request: cluster_pb2.WatchDirectoryRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.Directory]:
        seen = -1
        while True:
            async with self._changed:
                while self._version == seen:
                    await self._changed.wait()
                seen = self._version
                directory = cluster_pb2.Directory(
                    version=seen, workers=self._workers, places=self.places, adapters=self.adapters
                )
            yield directory

    async def Scale(self, request: cluster_pb2.ScaleRequest, context: Any) -> cluster_pb2.ScaleResponse:
        raise NotImplementedError("the stub controller has no Scale")

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: Any
    ) -> cluster_pb2.DrainWorkerResponse:
        raise NotImplementedError("the stub controller has no DrainWorker")

    async def RestartWorkers(
        self, request: cluster_pb2.RestartWorkersRequest, context: Any
    ) -> cluster_pb2.RollingRestart:
        raise NotImplementedError("the stub controller has no RestartWorkers")

    async def GetRestart(self, request: cluster_pb2.GetRestartRequest, context: Any) -> cluster_pb2.RollingRestart:
        raise NotImplementedError("the stub controller has no GetRestart")

    async def Apply(self, request: cluster_pb2.ApplyRequest, context: Any) -> cluster_pb2.ApplyResponse:
        raise NotImplementedError("the stub controller has no Apply")

    async def Register(self, request: cluster_pb2.RegisterRequest, context: Any) -> cluster_pb2.RegisterResponse:
        return cluster_pb2.RegisterResponse()

    def JoinRouter(
        self, request: cluster_pb2.JoinRouterRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.RouterSettings]:
        raise NotImplementedError("the stub controller has no JoinRouter")

    def GetModelFiles(
        self, request: cluster_pb2.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.ModelFilePart]:
        raise NotImplementedError("the stub controller has no GetModelFiles")

    async def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Any) -> cluster_pb2.ClusterStatus:
        return cluster_pb2.ClusterStatus()

    async def GetTrace(self, request: trace_pb2.GetTraceRequest, context: Any) -> trace_pb2.RequestTrace:
        return trace_pb2.RequestTrace()

    async def ListTraces(self, request: trace_pb2.ListTracesRequest, context: Any) -> trace_pb2.ListTracesResponse:
        return trace_pb2.ListTracesResponse()

    async def RecordRequests(
        self, request: trace_pb2.RecordRequestsRequest, context: Any
    ) -> AsyncIterator[trace_pb2.LoggedRequest]:
        yield trace_pb2.LoggedRequest()

    async def ListSnapshots(
        self, request: cluster_pb2.ListSnapshotsRequest, context: Any
    ) -> cluster_pb2.ListSnapshotsResponse:
        return cluster_pb2.ListSnapshotsResponse()

    async def Shutdown(self, request: cluster_pb2.ShutdownRequest, context: Any) -> cluster_pb2.ShutdownResponse:
        return cluster_pb2.ShutdownResponse()
