"""Serves snapshots as JSON. All viewers share one, rebuilt at most every FRESH_S and only on demand."""

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
STATUS_WAIT_S = 0.5  # longest delay of a viewer by a slow controller
STATUS_TIMEOUT_S = 5.0
STATUS_KEPT_S = 10.0  # how long the last status is used while the controller does not answer
IDLE_S = 30.0


class SnapshotSource:
    """Args:
    connect: opens a channel to the controller. The channel is closed after IDLE_S without viewers.
    """

    def __init__(self, view: RouterView, connect: Callable[[], grpc.aio.Channel], clock: Clock) -> None:
        self._view = view
        self._connect = connect
        self._clock = clock
        self._json = b""
        self._made_s: float | None = None
        self._status: cluster_pb2.ClusterStatus | None = None
        self._status_s = 0.0
        self._channel: grpc.aio.Channel | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def cluster_json(self) -> bytes:
        """The snapshot of the whole cluster; without an answer of the controller, of this router only."""
        if self._is_fresh():
            return self._json
        status = await self._controller_status()
        if not self._is_fresh():  # another viewer may have rebuilt it meanwhile
            view = self._view.take()
            self._json = msgspec.json.encode(view if status is None else with_status(view, status))
            self._made_s = self._clock.now_s()
        return self._json

    def router_json(self) -> bytes:
        """This router's own snapshot, for the controller, which has the rest."""
        return msgspec.json.encode(self._view.take())

    def timeline(self, request_id: str) -> RequestTimeline:
        """Raises NotFound."""
        return self._view.request_timeline(request_id)

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        await asyncio.gather(*self._closing)

    def _is_fresh(self) -> bool:
        return self._made_s is not None and self._clock.now_s() - self._made_s <= FRESH_S

    async def _controller_status(self) -> cluster_pb2.ClusterStatus | None:
        self._restart_idle_timer()
        if self._status is None or self._clock.now_s() - self._status_s > STATUS_FRESH_S:
            if self._fetching is None or self._fetching.done():
                self._fetching = asyncio.create_task(self._fetch_status(), name="dashboard-status")
            await asyncio.wait([self._fetching], timeout=STATUS_WAIT_S)
        is_kept = self._status is not None and self._clock.now_s() - self._status_s <= STATUS_KEPT_S
        return self._status if is_kept else None

    async def _fetch_status(self) -> None:
        self._channel = self._channel or self._connect()
        try:
            self._status = await ClusterStub(self._channel).GetStatus(
                cluster_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S
            )
            self._status_s = self._clock.now_s()
        except grpc.aio.AioRpcError as error:
            log.info("no status from the controller; the dashboard shows this router", extra={"error": error.details()})

    def _restart_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._on_idle)

    def _on_idle(self) -> None:
        """Frees the snapshot and the channel."""
        self._idle, self._json, self._made_s, self._status = None, b"", None, None
        if self._channel is not None:
            task = asyncio.create_task(self._channel.close(None))
            self._channel = None
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
