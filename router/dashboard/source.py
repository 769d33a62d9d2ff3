"""Snapshots as JSON, for however many viewers: worked out anew so often at most, and not at all while nobody looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
import msgspec

from router.dashboard.cluster_status import with_status
from router.dashboard.snapshot import RequestTimeline
from router.dashboard.view import RouterView
from tandem.clock import Clock
from tandem.v1 import cluster_pb2
from tandem.v1.cluster_pb2_grpc import ClusterStub

log = logging.getLogger(__name__)

FRESH_S = 0.4
STATUS_FRESH_S = 1.0
STATUS_WAIT_S = 0.5  # a viewer is not kept waiting longer for a controller that does not answer
STATUS_TIMEOUT_S = 5.0
STATUS_KEPT_S = 10.0  # of a controller that no longer answers
IDLE_S = 30.0


class SnapshotSource:
    """Args: `connect` opens a channel to the controller; it is closed when nobody has looked for a while."""

    def __init__(self, view: RouterView, connect: Callable[[], grpc.aio.Channel], clock: Clock) -> None:
        self._view = view
        self._connect = connect
        self._clock = clock
        self._json = b""
        self._made_s: float | None = None
        self._status: cluster_pb2.ClusterStatus | None = None
        self._status_s = 0.0
        self._channel: grpc.aio.Channel | None = None
        self._asking: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def cluster_json(self) -> bytes:
        """The whole cluster, where the controller answers; what this router knows of it, where not."""
        if self._is_fresh():
            return self._json
        status = await self._controller_status()
        if not self._is_fresh():  # others may have waited for the same
            view = self._view.take()
            self._json = msgspec.json.encode(view if status is None else with_status(view, status))
            self._made_s = self._clock.now_s()
        return self._json

    def router_json(self) -> bytes:
        """This router's own view, for the controller, which knows the rest itself."""
        return msgspec.json.encode(self._view.take())

    def timeline(self, request_id: str) -> RequestTimeline:
        """Raises NotFound."""
        return self._view.request_timeline(request_id)

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        await asyncio.gather(*self._closing)

    def _is_fresh(self) -> bool:
        return self._made_s is not None and self._clock.now_s() - self._made_s <= FRESH_S

    async def _controller_status(self) -> cluster_pb2.ClusterStatus | None:
        self._stay_awake()
        if self._status is None or self._clock.now_s() - self._status_s > STATUS_FRESH_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(), name="dashboard-status")
            await asyncio.wait([self._asking], timeout=STATUS_WAIT_S)
        is_kept = self._status is not None and self._clock.now_s() - self._status_s <= STATUS_KEPT_S
        return self._status if is_kept else None

    async def _ask(self) -> None:
        self._channel = self._channel or self._connect()
        try:
            self._status = await ClusterStub(self._channel).GetStatus(
                cluster_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S
            )
            self._status_s = self._clock.now_s()
        except grpc.aio.AioRpcError as error:
            log.info("the dashboard goes on without the controller", extra={"error": error.details()})

    def _stay_awake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._rest)

    def _rest(self) -> None:
        """Nobody looks any more."""
        self._idle, self._json, self._made_s, self._status = None, b"", None, None
        if self._channel is not None:
            task = asyncio.create_task(self._channel.close(None))
            self._channel = None
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
