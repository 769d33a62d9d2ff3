"""Queries every router for its traces, snapshot and demand. Only the router that accepted a request has its trace."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from router.edge.controller_api import SECRET_KEY
from router.observe.trace_store import DEFAULT_LISTED
from tandem.errors import TandemError, UnavailableError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.v1 import cluster_pb2, trace_pb2, trace_pb2_grpc

TIMEOUT_S = 5.0
RETRY_S = 1.0
MAX_BUFFERED_REQUESTS = 1024  # if the caller reads more slowly, routers drop requests and count them
DEMAND_TIMEOUT_S = 2.0
SNAPSHOT_TIMEOUT_S = 2.0  # shorter than `tandem status` waits, so a router that hangs does not hide the others

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RouterTraces:
    """Queries all routers in parallel. Routers that do not answer are left out. If no router has an answer, raises the
    TandemError of one that replied, or UnavailableError."""

    addresses: Mapping[str, str]  # by router name
    secret: str
    tls: ClusterTls | None = None

    async def get(self, request: trace_pb2.GetTraceRequest) -> trace_pb2.RequestTrace:
        answers = await self._ask_all(lambda stub: stub.GetTrace, request)
        return _found(answers)[0]

    async def list(self, request: trace_pb2.ListTracesRequest) -> trace_pb2.ListTracesResponse:
        answers = await self._ask_all(lambda stub: stub.ListTraces, request)
        traces = [trace for answer in _found(answers) for trace in answer.traces]
        # the order in which one router lists them
        traces.sort(key=lambda trace: trace.received_unix_s + trace.total_s, reverse=True)
        return trace_pb2.ListTracesResponse(traces=traces[: request.limit or DEFAULT_LISTED])

    async def record(self, request: trace_pb2.RecordRequestsRequest) -> AsyncGenerator[trace_pb2.LoggedRequest, None]:
        """Yields requests of all routers as they end. All use one salt, so equal prefixes have equal hashes across
        routers. If a router disconnects, it is queried again; requests that end there meanwhile are missing."""
        wanted = trace_pb2.RecordRequestsRequest(model=request.model, salt=secrets.token_bytes(32))
        logged: asyncio.Queue[trace_pb2.LoggedRequest | TandemError] = asyncio.Queue(maxsize=MAX_BUFFERED_REQUESTS)
        followers = [asyncio.create_task(self._follow(name, wanted, logged)) for name in self.addresses]
        try:
            while True:
                each = await logged.get()
                if isinstance(each, TandemError):
                    raise each
                yield each
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    async def _follow(
        self,
        name: str,
        request: trace_pb2.RecordRequestsRequest,
        logged: asyncio.Queue[trace_pb2.LoggedRequest | TandemError],
    ) -> None:
        while True:
            async with open_channel(self.addresses[name], self.tls, Identity.ROUTER) as channel:
                stub: trace_pb2_grpc.TracesAsyncStub = trace_pb2_grpc.TracesStub(channel)
                try:
                    async for each in stub.RecordRequests(request, metadata=((SECRET_KEY, self.secret),)):
                        await logged.put(each)
                except grpc.aio.AioRpcError as error:
                    failure = _router_error(name, error)
                    if not isinstance(failure, UnavailableError):
                        await logged.put(failure)
                        return
            await asyncio.sleep(RETRY_S)

    async def snapshots(self) -> cluster_pb2.ListSnapshotsResponse:
        answers = await self._ask_all(lambda stub: stub.GetSnapshot, trace_pb2.GetSnapshotRequest(), SNAPSHOT_TIMEOUT_S)
        return cluster_pb2.ListSnapshotsResponse(snapshots=_found(answers))

    async def demands(self) -> dict[str, trace_pb2.RouterDemand]:
        """Demand by router, for the routers that answered."""
        answers = await self._ask_all(lambda stub: stub.GetDemand, trace_pb2.GetDemandRequest(), DEMAND_TIMEOUT_S)
        found: dict[str, trace_pb2.RouterDemand] = {}
        for name, answer in zip(self.addresses, answers, strict=True):
            if isinstance(answer, TandemError):
                log.info("%s", answer.message)
            else:
                found[name] = answer
        return found

    async def _ask_all(
        self,
        method: Callable[[trace_pb2_grpc.TracesAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Request, Answer]],
        request: Request,
        timeout_s: float = TIMEOUT_S,
    ) -> Sequence[Answer | TandemError]:
        """The answer of each router, in the order of `addresses`."""

        async def ask(name: str) -> Answer | TandemError:
            async with open_channel(self.addresses[name], self.tls, Identity.ROUTER) as channel:
                call = method(trace_pb2_grpc.TracesStub(channel))
                try:
                    return await call(request, timeout=timeout_s, metadata=((SECRET_KEY, self.secret),))
                except grpc.aio.AioRpcError as error:
                    return _router_error(name, error)

        return await asyncio.gather(*map(ask, self.addresses))


def _found(answers: Sequence[Answer | TandemError]) -> list[Answer]:
    """The answers. If there is none, raises a router's own error rather than an UnavailableError."""
    found = [answer for answer in answers if not isinstance(answer, TandemError)]
    errors = [answer for answer in answers if isinstance(answer, TandemError)]
    if not found:
        no_router = UnavailableError("no router is in the cluster: none has started or joined yet")
        raise min(errors, key=lambda error: isinstance(error, UnavailableError), default=no_router)
    return found


def _router_error(name: str, error: grpc.aio.AioRpcError) -> TandemError:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return UnavailableError(f"the router {name} does not answer ({error.code().name}); try again")
    return error_from_rpc(error)
