"""`python -m cluster.control FILE`: the controller, a child of the keeper. FILE is its launch file.

Exit code 0: the cluster was asked to stop, and has. Any other: another controller takes over, usually of this keeper.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster.backends.protocol import Backend
from cluster.backends.subprocess_backend import SubprocessBackend
from cluster.control.controller import Controller, needed_cpus
from cluster.control.launch import (
    BEAT,
    BEAT_S,
    FAILED,
    PROGRESS,
    READY,
    STARTED,
    ControllerLaunch,
    FailureReport,
    StartedReport,
)
from cluster.interruptible import run_interruptible
from cluster.keeper.remote import RemoteKeeper
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import ResolvedCluster
from tandem.errors import TandemError
from tandem.telemetry.logs import setup_logging

log = logging.getLogger(__name__)

FAILED_EXIT_CODE = 1
CRASHED_EXIT_CODE = 2
LOST_EXIT_CODE = 3  # the keeper or the backend was lost, or another controller took over
LEFT_EXIT_CODE = 4  # it was asked to leave what runs to the controller of another keeper


class ReportHandler(logging.Handler):
    """Warnings and errors are also lines of `tandem up`."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._report = report
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._report, record.getMessage())


class ControllerProcess:
    def __init__(self, launch: ControllerLaunch, keeper: RemoteKeeper) -> None:
        self._launch = launch
        self._keeper = keeper
        self._has_started = False
        self._has_served = False
        self._reports: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Returns 0 when the cluster has stopped. Otherwise what runs belongs to the next controller: this process
        must end without another step, in which its tasks would stop their members."""
        cluster, log_dir = self._launch.cluster(), Path(self._launch.log_dir)
        source = SpecSource(self._launch.source, self._launch.flags)
        backend = make_backend(cluster, self._launch, self._keeper)
        run_base, holder = Path(self._launch.run_base), self._launch.holder
        controller = Controller(cluster, backend, self._keeper, run_base, log_dir, source, holder)
        code = CRASHED_EXIT_CODE
        beating = asyncio.create_task(self._beat())
        lost = asyncio.ensure_future(self._lost(controller.opened, backend))
        serving = asyncio.ensure_future(self._serve(controller))
        try:
            await asyncio.wait((lost, serving), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                code = LOST_EXIT_CODE
                log.error("this controller ends: %s", lost.result())
            else:
                code = serving.result()
            return code
        except asyncio.CancelledError:  # this process was asked to end
            if self._launch.spec.control.when_stopped == "leave" and (self._has_served or not controller.is_new):
                log.info("this controller ends, and what runs goes on")
                code = LEFT_EXIT_CODE
                return code
            code = 0
            raise
        except Exception:
            log.exception("this controller ends by a bug")
            return code
        finally:
            is_asked = code == 0
            failed_to_start = code != LOST_EXIT_CODE and controller.is_new and not self._has_served
            if controller.opened.is_set() and (is_asked or failed_to_start) and await backend.is_held():
                for task in (lost, serving):
                    task.cancel()
                await asyncio.gather(lost, serving, return_exceptions=True)
                await controller.close()
                beating.cancel()

    async def _beat(self) -> None:
        """Shows the keeper that this process is not stuck."""
        while True:
            await self._report(BEAT, "")
            await asyncio.sleep(BEAT_S)

    async def _lost(self, opened: asyncio.Event, backend: Backend) -> str:
        """Why this controller can act no more."""
        await opened.wait()
        ends = {asyncio.ensure_future(each) for each in (self._keeper.wait_lost(), backend.wait_lost())}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def _serve(self, controller: Controller) -> int:
        try:
            await controller.start()
            self._has_started = True
            started = StartedReport(
                admin=controller.admin_address,
                http=tuple(http for http, _ in controller.routers.addresses),
                grpc=tuple(grpc for _, grpc in controller.routers.addresses),
            )
            await self._keeper.report(STARTED, started.model_dump_json())
            await controller.wait_ready(self.progress)
            if controller.stop_requested.is_set():
                return 0
        except TandemError as error:
            log.info("cannot start: %s", error.message)
            await self._keeper.report(FAILED, FailureReport.of(error).model_dump_json())
            if controller.is_new or not self._has_started:
                return FAILED_EXIT_CODE
        self._has_served = True
        await self._keeper.report(READY, "")
        controller.workers.announce = self.progress
        await controller.stop_requested.wait()
        return 0

    def progress(self, text: str) -> None:
        task = asyncio.create_task(self._report(PROGRESS, text))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _report(self, kind: str, text: str) -> None:
        with suppress(TandemError):  # the keeper is gone, and this process will be
            await self._keeper.report(kind, text)


def make_backend(cluster: ResolvedCluster, launch: ControllerLaunch, keeper: RemoteKeeper) -> Backend:
    control = cluster.spec.control
    if control.backend == "subprocess":
        return SubprocessBackend(keeper, cluster.devices)
    from cluster.backends.ray_backend import (  # noqa: PLC0415 (importing Ray takes almost a second)
        LocalRay,
        RayBackend,
    )

    local = LocalRay(Path(launch.ray_dir), needed_cpus(cluster), len(cluster.devices))
    where = control.ray_address or local
    return RayBackend(
        cluster.spec.name,
        launch.holder,
        Path(launch.log_dir),
        keeper,
        where,
        control.start_timeout_s,
        logs_to_stdout=launch.logs_to_stdout,
    )


async def main(launch: ControllerLaunch) -> int:
    keeper = await RemoteKeeper.connect(Path(launch.keeper_socket))
    process = ControllerProcess(launch, keeper)
    reporting = ReportHandler(process.progress)
    logging.getLogger().addHandler(reporting)
    code = await process.run()
    logging.getLogger().removeHandler(reporting)
    if code:
        logging.shutdown()
        os._exit(code)
    await keeper.close()
    return 0


if __name__ == "__main__":
    found = ControllerLaunch.load(Path(sys.argv[1]))
    level = found.spec.log_level_of("controller")
    setup_logging(process="controller", level=level, log_format=found.spec.observability.logs.format)
    sys.exit(run_interruptible(main(found)))
