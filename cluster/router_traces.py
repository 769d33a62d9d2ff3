"""The traces that the router keeps, as the controller asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from router.edge_traces import SECRET_KEY
from tandem.errors import TandemError, UnavailableError
from tandem.grpc_errors import error_from_rpc
from tandem.v1 import trace_pb2, trace_pb2_grpc

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterTraces:
    """Every call raises the router's TandemError, or UnavailableError when it does not answer."""

    address: str
    secret: str

    async def get(self, request: trace_pb2.GetTraceRequest) -> trace_pb2.RequestTrace:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: trace_pb2_grpc.TracesAsyncStub = trace_pb2_grpc.TracesStub(channel)
            try:
                return await stub.GetTrace(request, timeout=TIMEOUT_S, metadata=((SECRET_KEY, self.secret),))
            except grpc.aio.AioRpcError as error:
                raise self._told(error) from None

    async def list(self, request: trace_pb2.ListTracesRequest) -> trace_pb2.ListTracesResponse:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: trace_pb2_grpc.TracesAsyncStub = trace_pb2_grpc.TracesStub(channel)
            try:
                return await stub.ListTraces(request, timeout=TIMEOUT_S, metadata=((SECRET_KEY, self.secret),))
            except grpc.aio.AioRpcError as error:
                raise self._told(error) from None

    def _told(self, error: grpc.aio.AioRpcError) -> TandemError:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return UnavailableError(f"the router at {self.address} does not answer ({error.code().name}); try again")
        return error_from_rpc(error)
