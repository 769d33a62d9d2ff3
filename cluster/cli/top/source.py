"""Fetches the frames of `tandem top` from the controller, which queries the routers."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import grpc.aio

from cluster.cli.admin_client import TIMEOUT_S, Admin, controller_error
from cluster.cli.request_trace import fetch
from cluster.cli.top.frame import TopFrame, build, parse_snapshot
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2


class FrameSource:
    """Holds one channel; use it as an async context manager."""

    def __init__(self, admin: Admin) -> None:
        self.admin = admin
        self.address = admin.address
        self._channel = admin.channel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def frame(self) -> TopFrame:
        """Raises UnavailableError if no controller answers, or a router's snapshot cannot be read."""
        stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(self._channel)
        try:
            status, snapshots = await asyncio.gather(
                stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=TIMEOUT_S), self._snapshots(stub)
            )
        except grpc.aio.AioRpcError as error:
            raise controller_error(error, self.admin) from None
        return build(status, [parse_snapshot(each.json) for each in snapshots.snapshots])

    async def trace(self, request_id: str) -> trace_pb2.RequestTrace:
        """Raises NotFound until the request has ended, and UnavailableError like `frame`."""
        return await fetch(self.admin, request_id)

    async def _snapshots(self, stub: cluster_pb2_grpc.ClusterAsyncStub) -> cluster_pb2.ListSnapshotsResponse:
        """Empty if no router answers the controller, as during a start."""
        try:
            return await stub.ListSnapshots(cluster_pb2.ListSnapshotsRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return cluster_pb2.ListSnapshotsResponse()
