"""Routers that the controller did not start, such as those of a Kubernetes Deployment. A router is in the cluster
as long as its JoinRouter call lasts. It is watched and replaced by what started it: a Deployment, systemd, a person."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
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
ADDRESS = r"[A-Za-z0-9.:%\[\]_-]{1,250}:[0-9]{1,5}"
SETTINGS_ID_CHARS = 32
MAX_LEAVE_S = 120.0
LEAVE_MARGIN_S = 15.0
GONE_S = 20.0  # a router that starts again has joined by then
MAX_RETURNS = 3  # of a router that then leaves again without serving
POLL_S = 0.2


@dataclass(slots=True)
class _Joined:
    """`settings_id`: of what it has, or was told to have."""

    request: cluster_pb2.JoinRouterRequest
    settings_id: str
    unsent: RouterLaunch | None
    told: asyncio.Event = field(default_factory=asyncio.Event)  # there is something to tell it, or it was replaced
    left: asyncio.Event = field(default_factory=asyncio.Event)  # or was replaced
    is_replaced: bool = False
    has_served: bool = False


class JoinedRouters:
    """Args: `settings` gives the launch of a router by its id. While settings change, True means the new ones, and
    False those of routers whose turn has not come."""

    def __init__(
        self,
        cluster: str,
        tls: ClusterTls | None,
        settings: Callable[[str, bool], RouterLaunch],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a router has joined or left."""
        self._cluster = cluster
        self._tls = tls
        self._settings = settings
        self._on_change = on_change
        self._joined: dict[str, _Joined] = {}
        self._turns: dict[str, int] = {}  # routers that were told in the change under way: how often each joined since

    @property
    def control_addresses(self) -> dict[str, str]:
        return {name: each.request.control_address for name, each in self._joined.items()}

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """HTTP and gRPC."""
        return [(each.request.http_address, each.request.grpc_address) for each in self._joined.values()]

    @property
    def names(self) -> tuple[str, ...]:
        """With those that are away because their settings change."""
        return tuple(self._joined | self._turns)

    @property
    def has_outdated(self) -> bool:
        """Whether one has other settings than the present ones."""
        return self._next_turn() is not None

    async def follow(self, request: cluster_pb2.JoinRouterRequest) -> AsyncGenerator[cluster_pb2.RouterSettings, None]:
        """Raises IncompatibleVersions, InputError, OverloadedError."""
        common_version(
            CONTROL_VERSIONS, stated_versions(request, CONTROL_BEFORE_RANGES), ("the controller", request.router_id)
        )
        self._check(request)
        if (earlier := self._joined.get(request.router_id)) is not None:
            address = earlier.request.control_address
            if address != request.control_address and await self._serves(earlier):
                raise InputError(
                    f"router_id: another router named {request.router_id} serves at {address}: choose another --name",
                    field="router_id",
                )
        with self._member(request) as member:
            while not member.is_replaced:
                launch, member.unsent = member.unsent, None
                yield cluster_pb2.RouterSettings(
                    launch="" if launch is None else launch.model_dump_json(),
                    settings_id=member.settings_id,
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
        if request.settings_id:  # it keeps what it has until its turn comes
            member = _Joined(request, request.settings_id, None)
        else:
            launch = self._settings(name, name in self._turns)
            member = _Joined(request, settings_id(launch), launch)
        self._joined[name] = member
        if name in self._turns:
            self._turns[name] += 1
        log.info("router joined", extra={"router": name, "http": request.http_address})
        self._on_change()
        try:
            yield member
        finally:
            member.left.set()
            if self._joined.get(name) is member:
                del self._joined[name]
                log.info("router left", extra={"router": name})
                self._on_change()

    async def wait_for(self, names: Iterable[str]) -> None:
        """Returns when routers with these names have joined and serve, or could have."""
        loop = asyncio.get_running_loop()
        last_s = loop.time() + GONE_S
        for name in names:
            while not await self._serves(self._joined.get(name)):
                if loop.time() > last_s:
                    log.warning("a router of the controller before has not come back", extra={"router": name})
                    break
                await asyncio.sleep(POLL_S)

    async def settle(self, timeout_s: float) -> None:
        """Sends the present settings to each router that has others. It then leaves, ends its requests and joins again;
        when it serves, the next one's turn comes. One that does not come back was ended on purpose, and its successor
        has another name.

        Raises UnavailableError if one does not take them, or does not serve with them in `timeout_s`.
        """
        self._turns.clear()
        try:
            while (name := self._next_turn()) is not None:
                self._turns[name] = 0
                log.info("sending other settings", extra={"router": name})
                await self._change(name, self._joined[name], timeout_s)
        finally:
            self._turns.clear()

    def _next_turn(self) -> str | None:
        for name, member in self._joined.items():
            if name not in self._turns and member.settings_id != settings_id(self._settings(name, True)):
                return name
        return None

    async def _change(self, name: str, member: _Joined, timeout_s: float) -> None:
        member.unsent = self._settings(name, True)
        leave_s = min(MAX_LEAVE_S, member.request.leave_s) + member.unsent.router.drain_timeout_s + LEAVE_MARGIN_S
        member.settings_id = settings_id(member.unsent)
        member.told.set()
        try:
            async with asyncio.timeout(leave_s):
                await member.left.wait()
        except TimeoutError:
            raise UnavailableError(f"{name} did not take other settings within {leave_s:g} s") from None
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_it_serves(name)
        except TimeoutError:
            raise UnavailableError(f"{name} did not serve with other settings within {timeout_s:g} s") from None

    async def _until_it_serves(self, name: str) -> None:
        """Or until it is gone for good."""
        loop = asyncio.get_running_loop()
        seen_s = loop.time()
        while True:
            now = self._joined.get(name)
            if now is not None:
                seen_s = loop.time()
                if await self._serves(now):
                    return
            is_gone = loop.time() - seen_s > GONE_S
            if is_gone and not self._turns[name]:
                return
            if is_gone or self._turns[name] > MAX_RETURNS:
                raise UnavailableError(f"{name} ended before it served with other settings: its own log says why")
            await asyncio.sleep(POLL_S)

    async def _serves(self, member: _Joined | None) -> bool:
        return member is not None and await is_serving(member.request.control_address, self._tls)

    def _check(self, request: cluster_pb2.JoinRouterRequest) -> None:
        if request.cluster != self._cluster:
            raise InputError(
                f"cluster: this is {self._cluster}, and the router is for {request.cluster[:64]!r} (--cluster)",
                field="cluster",
            )
        if not re.fullmatch(ROUTER_ID, request.router_id):
            raise InputError(f"router_id: expected {ROUTER_ID}, got {request.router_id[:64]!r}", field="router_id")
        if re.fullmatch(r"router-[0-9]+", request.router_id):
            raise InputError(
                "router_id: names such as router-0 are of routers that the cluster starts", field="router_id"
            )
        for name in ("http_address", "grpc_address", "control_address"):
            if not re.fullmatch(ADDRESS, getattr(request, name)):
                raise InputError(f"{name}: expected HOST:PORT, got {getattr(request, name)[:64]!r}", field=name)
        if len(request.settings_id) > SETTINGS_ID_CHARS:
            raise InputError(f"settings_id: expected at most {SETTINGS_ID_CHARS} characters", field="settings_id")

    async def status(self) -> list[RouterStatus]:
        return await asyncio.gather(*(self._status(each) for each in list(self._joined.values())))

    async def _status(self, member: _Joined) -> RouterStatus:
        request = member.request
        state = RouterState.NOT_READY if member.has_served else RouterState.STARTING
        if await self._serves(member):
            state, member.has_served = RouterState.READY, True
        return RouterStatus(request.router_id, state, 0, request.http_address, request.grpc_address, has_joined=True)


def settings_id(launch: RouterLaunch) -> str:
    return hashlib.sha256(launch.model_dump_json().encode()).hexdigest()[:SETTINGS_ID_CHARS]


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
