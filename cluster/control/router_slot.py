"""One router of the spec: starts it, watches it, and restarts it when it ends. Routers are independent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.backends.protocol import MemberHandle
from cluster.control.record import RouterRecord
from cluster.keeper.members import MemberStart, ProcessSpec, RunningProcess, is_running
from cluster.keeper.supervisor import python
from cluster.spec.resolve import port_is_free
from cluster.tasks import count_failure
from tandem.config.launch import RouterLaunch
from tandem.config.router import RouterSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import PortInUse, UnavailableError
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 2.0
RESTART_DELAY_S = 0.5
POLL_S = 0.1
CRASHES = 2  # of a router that is restarted, before that has failed
STOP_MARGIN_S = 2.0  # added to the router's drain timeout before SIGKILL


class RouterState(StrEnum):
    STARTING = "starting"
    READY = "ready"  # its health check says it serves: it has a worker for each model
    NOT_READY = "not_ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # it ended before it ever served


@dataclass(frozen=True, slots=True)
class RouterStatus:
    name: str
    state: RouterState
    restarts: int
    http_address: str
    grpc_address: str
    has_joined: bool = False


class RouterSlot:
    """Restarts keep the router's addresses."""

    def __init__(
        self, record: RouterRecord, member: MemberHandle, run_dir: Path, on_change: Callable[[], None]
    ) -> None:
        launch = record.launch
        self.name = launch.router_id
        self.http_address = f"{launch.router.http_host}:{launch.router.http_port}"
        self.grpc_address = f"{launch.router.grpc_host}:{launch.router.grpc_port}"
        self.control_address = f"unix:{launch.controller_socket}"  # in a private folder, so without TLS
        self.restarts = record.restarts
        self.failure = ""  # why the router cannot start; empty while it may
        self.launch = launch  # what its process was started with
        self._launch = launch  # of its next start
        self._run_dir = run_dir
        self._member = member
        self._on_change = on_change
        self._start = self._start_of(launch)
        self._has_served = record.has_served
        self._is_restarting = False
        self._closing = False
        self._reason = ""  # of its last end

    def record(self) -> RouterRecord:
        return RouterRecord(launch=self.launch, restarts=self.restarts, has_served=self._has_served)

    async def change(self, launch: RouterLaunch, timeout_s: float) -> None:
        """Restarts it with these settings, as `restart`. Its hosts and ports stay."""
        self._launch, self._start = launch, self._start_of(launch)
        await self.restart(self.restarts, timeout_s)

    def _start_of(self, launch: RouterLaunch) -> MemberStart:
        process = ProcessSpec(
            name="router",
            argv=python("router", "--launch", f"{self._run_dir}/launch.json"),
            stop_grace_s=launch.router.drain_timeout_s + STOP_MARGIN_S,
        )
        files = {"launch.json": launch.model_dump_json()}
        return MemberStart(run_dir=str(self._run_dir), files=files, processes=(process,))

    async def run(self) -> None:
        """Restarts the router whenever it ends, until it is closed or fails to start."""
        try:
            while (reason := await self._run_once()) and not self._closing:
                if not self._has_served:
                    self.failure = f"{self.name}: {reason}"
                    return
                log.warning("%s ended: %s", self.name, reason)
                self._reason = reason
                self.restarts += 1
                self._is_restarting = True
                self._on_change()
                await self._member.stop()
                await asyncio.sleep(RESTART_DELAY_S)
        finally:
            await self._member.stop()

    async def _run_once(self) -> str:
        """Returns why the router ended. Raises only before it ever served: the start says why."""
        try:
            found = await self._member.running()
            if found is not None and not is_running(found, self._start):  # it ended while there was no controller
                return found.end.reason if found.end is not None else "it was started otherwise"
            if found is None:
                self.launch = self._launch
                await self._member.start(self._start)
                self._on_change()
            self._is_restarting = False
            return (await self._member.wait_end()).reason
        except Exception as error:
            if not self._has_served:
                raise
            count_failure(self.name, "it could not be run")
            return f"it could not be run: {error}"

    async def restart(self, restarts: int, timeout_s: float) -> None:
        """Stops the router when it serves, unless it has restarted since `restarts`: `run` starts it again. Its running
        requests may end within its drain timeout. Returns when it serves again.

        Raises UnavailableError if it cannot start, ends more than CRASHES times, or does not serve in `timeout_s`
        beyond its drain.
        """
        is_stopped, most_s = False, timeout_s + self._launch.router.drain_timeout_s + STOP_MARGIN_S
        try:
            async with asyncio.timeout(most_s):
                while (state := await self._state()) is not RouterState.READY or self.restarts == restarts:
                    if self.failure:
                        raise UnavailableError(self.failure)
                    if self.restarts - restarts > 1 + CRASHES:
                        raise UnavailableError(f"{self.name} ends whenever it is started: {self._reason}")
                    if state is RouterState.READY and not is_stopped:
                        is_stopped = True
                        await self._member.stop()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UnavailableError(f"{self.name} did not serve again within {most_s:g} s") from None

    async def close(self) -> None:
        """Stops the router. Running requests may finish within its drain timeout; the rest end with an error."""
        self._closing = True
        await self._member.stop()

    async def status(self) -> RouterStatus:
        return RouterStatus(self.name, await self._state(), self.restarts, self.http_address, self.grpc_address)

    async def processes(self) -> list[RunningProcess]:
        """Named after the router, since all routers run the same program."""
        running = await self._member.running()
        return [RunningProcess(name=self.name, pid=each.pid) for each in (running.processes if running else ())]

    async def _state(self) -> RouterState:
        if self.failure:
            return RouterState.FAILED
        if self._is_restarting:
            return RouterState.RESTARTING
        if await is_serving(self.control_address, None):
            if not self._has_served:
                self._has_served = True
                self._on_change()
            return RouterState.READY
        return RouterState.NOT_READY if self._has_served else RouterState.STARTING


async def is_serving(control_address: str, tls: ClusterTls | None) -> bool:
    try:
        async with open_channel(control_address, tls, Identity.ROUTER) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.aio.AioRpcError:
        return False


def router_specs(spec: ClusterSpec) -> list[RouterSpec]:
    """One spec per router. The first has the configured ports; each further router has the next free ports above them.

    Raises PortInUse if too few ports are free.
    """
    first = spec.router
    if not first.replicas:
        return []
    taken = {first.http_port, first.grpc_port, spec.control.admin_port}
    specs = [first]
    for _ in range(first.replicas - 1):
        ports = {
            "http_port": _next_port("router.http_port", first.http_host, specs[-1].http_port, taken),
            "grpc_port": _next_port("router.grpc_port", first.grpc_host, specs[-1].grpc_port, taken),
        }
        specs.append(first.model_copy(update=ports))
    return specs


def _next_port(field: str, host: str, after: int, taken: set[int]) -> int:
    for port in range(after + 1, 1 << 16):
        if port not in taken and port_is_free(host, port):
            taken.add(port)
            return port
    raise PortInUse(
        f"{field}: no port above {after} is free on {host}: choose a lower port, or fewer routers", field=field
    )
