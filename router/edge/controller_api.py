"""The router's traces, snapshots and demand, for its controller only. Clients share the port, so a secret protects the
requests of others from them."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from router.observe.request_tap import RequestTap
from router.observe.trace_store import MAX_TRACES, TraceStore
from tandem.errors import TandemError, Unauthenticated
from tandem.rpc.grpc_errors import abort
from tandem.v1 import trace_pb2
from tandem.v1.trace_pb2_grpc import TracesServicer

SECRET_KEY = "tandem-controller-secret"


class TracesEdge(TracesServicer):
    """Args: `snapshot` returns the router's state, `demand` the load that clients offer. `secret` comes from the
    controller that started this router; None: every call is refused. GuardedServer calls `check` before each method."""

    def __init__(
        self,
        traces: TraceStore,
        tap: RequestTap,
        snapshot: Callable[[], bytes],
        demand: Callable[[], trace_pb2.RouterDemand],
        secret: str | None,
    ) -> None:
        self._traces = traces
        self._tap = tap
        self._snapshot = snapshot
        self._demand = demand
        self._secret = secret

    async def GetTrace(self, request: trace_pb2.GetTraceRequest, context: Any) -> trace_pb2.RequestTrace:
        try:
            return self._traces.get(request.request_id).to_wire()
        except TandemError as error:
            await abort(context, error)

    async def ListTraces(self, request: trace_pb2.ListTracesRequest, context: Any) -> trace_pb2.ListTracesResponse:
        found = self._traces.latest(min(request.limit, MAX_TRACES))
        return trace_pb2.ListTracesResponse(traces=[trace.to_wire() for trace in found])

    async def RecordRequests(
        self, request: trace_pb2.RecordRequestsRequest, context: Any
    ) -> AsyncIterator[trace_pb2.LoggedRequest]:
        try:
            async with aclosing(self._tap.listen(request.salt, request.model)) as logged:
                async for each in logged:
                    yield each
        except TandemError as error:
            await abort(context, error)

    async def GetSnapshot(self, request: trace_pb2.GetSnapshotRequest, context: Any) -> trace_pb2.RouterSnapshot:
        return trace_pb2.RouterSnapshot(json=self._snapshot())

    async def GetDemand(self, request: trace_pb2.GetDemandRequest, context: Any) -> trace_pb2.RouterDemand:
        return self._demand()

    def check(self, context: Any) -> None:
        """Raises Unauthenticated for a call that does not show the secret."""
        shown = dict(context.invocation_metadata() or ()).get(SECRET_KEY, "")
        if self._secret is None or not hmac.compare_digest(str(shown).encode(), self._secret.encode()):
            raise Unauthenticated("traces are for the controller only: use `tandem trace`")
