"""A running cluster as an async context manager, for `up` and `demo`. This process is its keeper."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.backends.ray_env import prepare_local_ray
from cluster.cli import state_file
from cluster.cli.machine_limits import check_disks, check_open_files, check_shared_memory
from cluster.cli.run_dirs import lasting_base, ray_base, run_base
from cluster.control.launch import (
    BEAT,
    BEAT_S,
    FAILED,
    LAUNCH_FILE,
    PROGRESS,
    READY,
    STARTED,
    ControllerLaunch,
    FailureReport,
    StartedReport,
)
from cluster.keeper.keeper import Keeper
from cluster.keeper.lossy_output import own_output
from cluster.keeper.members import MemberEnd, MemberStart, ProcessSpec
from cluster.keeper.remote import KeeperServer
from cluster.keeper.supervisor import python
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import ResolvedCluster, resolve, with_free_ports
from cluster.tasks import keep_running
from router.edge.limits.http import raise_file_limit
from tandem.config.spec import ClusterSpec
from tandem.errors import TandemError, UnavailableError

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

CONTROLLER = "controller"  # the keeper's name for it
CLOSE_S = 60.0  # added to the routers' drain: how long a controller may take to stop the cluster
STABLE_S = 10.0  # a controller that ran for so long is followed by the next without delay
MAX_DELAY_S = 5.0
MISSED_BEATS = 15  # then it is stuck
FAILED_TAKEOVERS = 5  # in a row, on a Ray cluster that is not the keeper's: then it is lost
RAY_LOST_EXIT_CODE = 4
FAILED_EXIT_CODE = 1
LONGEST_START_S = 60  # for loading its modules, before the first beat


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """`routers`: pairs of HTTP and gRPC address. The first router's are those shown to users."""

    spec: ClusterSpec
    log_dir: Path
    admin_address: str
    routers: tuple[tuple[str, str], ...]
    controllers: Controllers

    async def wait_stopped(self) -> int:
        """Returns the exit code when the cluster was stopped by its admin API, or can have no controller."""
        await self.controllers.stopped.wait()
        return self.controllers.exit_code

    @property
    def http_address(self) -> str:
        """Of the first router; empty: the cluster starts none."""
        return self.routers[0][0] if self.routers else ""

    @property
    def grpc_address(self) -> str:
        return self.routers[0][1] if self.routers else ""


class Controllers:
    """Runs a controller, and another one whenever it dies, which takes over what runs. If the first cannot start the
    cluster, that is the end."""

    def __init__(self, launch: ControllerLaunch, progress: Progress, started: Callable[[StartedReport], None]) -> None:
        """`started` is called when the first controller has started every part, which is before the cluster serves."""
        self.keeper = Keeper(Path(launch.log_dir), own_output() if launch.logs_to_stdout else None)
        self.stopped = asyncio.Event()
        self.exit_code = 0
        self._joins_ray = launch.spec.control.ray_address is not None
        self._failed_takeovers = 0
        self._progress = progress
        self._started = started
        self._server = KeeperServer(self.keeper, self._reported)
        self._socket = Path(launch.keeper_socket)
        run_dir = str(self._socket.parent / CONTROLLER)
        process = ProcessSpec(
            name=CONTROLLER,
            argv=python("cluster.control", f"{run_dir}/{LAUNCH_FILE}"),
            stop_grace_s=launch.spec.router.drain_timeout_s + CLOSE_S,
        )
        files = {LAUNCH_FILE: launch.model_dump_json()}
        self._start = MemberStart(run_dir=run_dir, files=files, processes=(process,))
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._missed = 0  # beats of the controller

    async def start(self) -> None:
        """Returns when the cluster serves. Raises TandemError if it cannot."""
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._server.serve(self._socket)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        await self._ready

    async def close(self) -> None:
        """The controller stops the cluster. What it leaves is stopped here."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.keeper.stop(CONTROLLER)
        await self._server.close()
        await self.keeper.close()

    async def _run(self) -> None:
        loop, delay_s = asyncio.get_running_loop(), 0.0
        while True:
            started_s = loop.time()
            await self.keeper.start(CONTROLLER, self._start)
            watching = asyncio.create_task(keep_running("watch of the controller", self._kill_if_stuck))
            try:
                end = await self.keeper.wait_end(CONTROLLER)
            finally:
                watching.cancel()
            if self._is_final(end):
                return
            self._failed_takeovers += 1  # until the next one serves
            if self._joins_ray and self._failed_takeovers > FAILED_TAKEOVERS:
                self._say(f"the Ray cluster is lost: {FAILED_TAKEOVERS} controllers in a row could not use it")
                self.exit_code = RAY_LOST_EXIT_CODE
                return
            self._say(f"{end.reason}; the next one takes over")
            await self.keeper.stop(CONTROLLER)
            delay_s = 0.0 if loop.time() - started_s >= STABLE_S else min(MAX_DELAY_S, 2 * delay_s + 0.1)
            await asyncio.sleep(delay_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Without it, a bug in `_run` would leave the cluster without a controller, and `start` waiting."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("no controller can be started any more", exc_info=error)
            self.exit_code = FAILED_EXIT_CODE
        if not self._ready.done():
            self._ready.set_exception(error or UnavailableError("the cluster was stopped before it was ready"))
        self.stopped.set()

    async def _kill_if_stuck(self) -> None:
        """Counts beats of its own, not seconds: this process may have been stopped too, as by Ctrl-Z."""
        self._missed = -LONGEST_START_S
        while True:
            await asyncio.sleep(BEAT_S)
            self._missed += 1
            if self._missed > MISSED_BEATS:
                self._say(f"the controller has not answered for {MISSED_BEATS * BEAT_S:g} s: killing it")
                controller = (await self.keeper.members()).get(CONTROLLER)
                for process in controller.processes if controller is not None else ():
                    os.kill(process.pid, signal.SIGKILL)
                return

    def _is_final(self, end: MemberEnd) -> bool:
        if end.exit_code and not self._ready.done():
            self._ready.set_exception(UnavailableError(end.reason))
        return end.exit_code == 0 or (self._ready.done() and self._ready.exception() is not None)

    def _say(self, text: str) -> None:
        """What cannot be told must not end the cluster."""
        try:
            self._progress(text)
        except Exception:
            log.exception("cannot tell: %s", text)

    def _reported(self, kind: str, text: str) -> None:
        if kind == BEAT:
            self._missed = 0
        elif kind == PROGRESS:
            self._say(text)
        elif kind == STARTED:
            if not self._ready.done():
                self._started(StartedReport.model_validate_json(text))
        elif kind == READY:
            self._failed_takeovers = 0
            if not self._ready.done():
                self._ready.set_result(None)
        elif kind == FAILED:
            error = FailureReport.model_validate_json(text).error()
            if self._ready.done():
                self._say(f"the controller could not take over: {error.message}")
            else:
                self._ready.set_exception(error)


@asynccontextmanager
async def running_cluster(
    spec: ClusterSpec, progress: Progress, source: SpecSource | None = None
) -> AsyncIterator[RunningCluster]:
    """Yields once everything is ready, and stops everything on exit, even if the start failed. `source`: the origin of
    `spec`, for `tandem apply`."""
    state_file.refuse_second(spec.name)
    check_open_files(spec)
    check_disks()
    check_shared_memory(spec)
    raise_file_limit()  # here, because every process of the cluster inherits it
    with state_file.written(state_file.of_this_process(spec.name)):
        cluster = with_free_ports(await asyncio.to_thread(resolve, spec, progress))
        async with _running(cluster, progress, source or SpecSource(spec, {})) as running:
            yield running


@asynccontextmanager
async def _running(cluster: ResolvedCluster, progress: Progress, source: SpecSource) -> AsyncIterator[RunningCluster]:
    spec = cluster.spec
    log_dir = state_file.new_log_dir(spec.name)
    launch = _launch(cluster, source, log_dir)
    state = state_file.of_this_process(spec.name)
    routers: tuple[tuple[str, str], ...] = ()

    def started(addresses: StartedReport) -> None:
        """From now on, `tandem status` shows how far the start is."""
        nonlocal state, routers
        routers = tuple(zip(addresses.http, addresses.grpc, strict=True))
        http, grpc = routers[0] if routers else ("", "")
        state = replace(state, admin=addresses.admin, http=http, grpc=grpc)
        if spec.security.tls is not None:
            state = replace(state, tls=spec.security.tls.model_dump())
        if spec.router.tls is not None:
            state = replace(state, edge_ca=spec.router.tls.cert)
        state_file.write(state)

    controllers = Controllers(launch, progress, started)
    try:
        progress(f"starting the cluster ({spec.control.backend})")
        await controllers.start()
        state_file.write(replace(state, is_ready=True))
        yield RunningCluster(spec, log_dir, state.admin, routers, controllers)
    except TandemError:
        if log_dir.is_dir():  # not if the logs went to stdout
            progress(f"the logs are in {log_dir}")
        raise
    finally:
        await controllers.close()
        shutil.rmtree(Path(launch.keeper_socket).parent, ignore_errors=True)  # not what may outlive this process


def _launch(cluster: ResolvedCluster, source: SpecSource, log_dir: Path) -> ControllerLaunch:
    spec = cluster.spec
    on_local_ray = spec.control.backend == "ray" and spec.control.ray_address is None
    if on_local_ray:
        prepare_local_ray(spec.security.tls, spec.control.devices)
    outlives = spec.control.backend == "ray" and not on_local_ray
    own = run_base(spec.name)
    base = lasting_base(spec.name) if outlives else own
    return ControllerLaunch.of(cluster, source, run_base=base, keeper_dir=own, log_dir=log_dir, ray_dir=ray_base())
