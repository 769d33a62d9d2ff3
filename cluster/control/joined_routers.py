"""Routers that the controller did not start, such as those of a Kubernetes Deployment. A router is in the cluster for
as long as its JoinRouter call lasts: whoever started it watches and replaces it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.control.router_slot import RouterState, RouterStatus, is_serving
from tandem.checkpoint.model_store import TEXT_FILES
from tandem.config.launch import ROUTER_ID, RouterLaunch
from tandem.errors import InputError, OverloadedError, UnavailableError
from tandem.rpc.grpc_tls import ClusterTls
from tandem.rpc.versions import CONTROL_BEFORE_RANGES, CONTROL_VERSIONS, common_version, stated_versions
from tandem.v1 import cluster_pb2

log = logging.getLogger(__name__)

MAX_JOINED = 256
PART_BYTES = 1 << 20
LEAVE_S = 120.0  # at most, in which a router that will leave still takes requests
GONE_S = 20.0  # a router that starts again has joined by then
POLL_S = 0.2


@dataclass(slots=True)
class _Joined:
    request: cluster_pb2.JoinRouterRequest
    sent: RouterLaunch
    told: asyncio.Event = field(default_factory=asyncio.Event)  # there is something to tell it, or it was replaced
    is_replaced: bool = False
    has_served: bool = False


class JoinedRouters:
    """Args: `settings` is the launch of a router with that id, as of now."""

    def __init__(self, tls: ClusterTls | None, settings: Callable[[str], RouterLaunch]) -> None:
        self._tls = tls
        self._settings = settings
        self._joined: dict[str, _Joined] = {}

    @property
    def control_addresses(self) -> dict[str, str]:
        return {name: each.request.control_address for name, each in self._joined.items()}

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """HTTP and gRPC."""
        return [(each.request.http_address, each.request.grpc_address) for each in self._joined.values()]

    async def follow(self, request: cluster_pb2.JoinRouterRequest) -> AsyncGenerator[cluster_pb2.RouterSettings, None]:
        """Raises IncompatibleVersions, InputError, OverloadedError."""
        common_version(
            CONTROL_VERSIONS, stated_versions(request, CONTROL_BEFORE_RANGES), ("the controller", request.router_id)
        )
        _check(request)
        with self._member(request) as member:
            while not member.is_replaced:
                yield cluster_pb2.RouterSettings(
                    launch=member.sent.model_dump_json(),
                    protocol=CONTROL_VERSIONS.protocol,
                    oldest_protocol=CONTROL_VERSIONS.oldest_protocol,
                )
                await member.told.wait()
                member.told.clear()

    @contextmanager
    def _member(self, request: cluster_pb2.JoinRouterRequest) -> Iterator[_Joined]:
        name = request.router_id
        if (earlier := self._joined.pop(name, None)) is not None:
            earlier.is_replaced = True
            earlier.told.set()
        elif len(self._joined) >= MAX_JOINED:
            raise OverloadedError(
                f"router_id: this cluster has {MAX_JOINED} joined routers, which is the most it takes"
            )
        member = self._joined[name] = _Joined(request, self._settings(name))
        log.info("router joined", extra={"router": name, "http": request.http_address})
        try:
            yield member
        finally:
            if self._joined.get(name) is member:
                del self._joined[name]
                log.info("router left", extra={"router": name})

    async def settle(self, timeout_s: float) -> None:
        """Sends each router the present settings, if they are others. It then leaves, ends its requests, and joins
        again: only when it serves is the next one's turn.

        Raises UnavailableError if it does not serve again in `timeout_s` beyond its drain.
        """
        for name, member in list(self._joined.items()):
            wanted = self._settings(name)
            if member.sent == wanted or self._joined.get(name) is not member:
                continue
            log.info("sending other settings", extra={"router": name})
            most_s = timeout_s + LEAVE_S + member.sent.router.drain_timeout_s
            member.sent = wanted
            member.told.set()
            try:
                async with asyncio.timeout(most_s):
                    await self._until_replaced(name, member)
            except TimeoutError:
                raise UnavailableError(f"{name} did not serve again within {most_s:g} s") from None

    async def _until_replaced(self, name: str, member: _Joined) -> None:
        """Or until it is gone for good: whoever started it ended it, and the next one has another name. One that comes
        back and leaves again without serving is not gone, but failing."""
        loop, left_s, came_back = asyncio.get_running_loop(), None, False
        while True:
            now = self._joined.get(name)
            if now is not member:
                if await self._serves(now):
                    return
                came_back = came_back or now is not None
                left_s = left_s or loop.time()
                if not came_back and loop.time() - left_s > GONE_S:
                    return
            await asyncio.sleep(POLL_S)

    async def _serves(self, member: _Joined | None) -> bool:
        return member is not None and await is_serving(member.request.control_address, self._tls)

    async def status(self) -> list[RouterStatus]:
        return await asyncio.gather(*(self._status(each) for each in list(self._joined.values())))

    async def _status(self, member: _Joined) -> RouterStatus:
        request = member.request
        state = RouterState.NOT_READY if member.has_served else RouterState.STARTING
        if await self._serves(member):
            state, member.has_served = RouterState.READY, True
        return RouterStatus(request.router_id, state, 0, request.http_address, request.grpc_address)


def _check(request: cluster_pb2.JoinRouterRequest) -> None:
    if not re.fullmatch(ROUTER_ID, request.router_id):
        raise InputError(f"router_id: expected {ROUTER_ID}, got {request.router_id[:64]!r}", field="router_id")
    if re.fullmatch(r"router-\d+", request.router_id):
        raise InputError("router_id: names such as router-0 are of routers that the cluster starts", field="router_id")
    for name in ("http_address", "grpc_address", "control_address"):
        if not getattr(request, name):
            raise InputError(f"{name}: expected a value, got none", field=name)


def model_files(folder: Path) -> Iterator[cluster_pb2.ModelFilePart]:
    """Those that a router reads. Raises OSError."""
    for name in TEXT_FILES:
        if not (folder / name).is_file():
            continue
        with (folder / name).open("rb") as file:
            data = file.read(PART_BYTES)
            yield cluster_pb2.ModelFilePart(name=name, data=data)
            while data := file.read(PART_BYTES):
                yield cluster_pb2.ModelFilePart(name=name, data=data)
