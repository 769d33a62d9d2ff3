"""A running cluster as an async context manager, for `up` and `demo`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster.backends.protocol import Backend
from cluster.backends.ray_env import prepare_local_ray
from cluster.backends.subprocess_backend import SubprocessBackend
from cluster.cli import state_file
from cluster.cli.run_dirs import ray_base, run_base
from cluster.control.controller import Controller, needed_cpus, with_free_ports
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import ResolvedCluster, resolve
from tandem.config.spec import ClusterSpec
from tandem.errors import TandemError

Progress = Callable[[str], None]


def make_backend(cluster: ResolvedCluster, log_dir: Path) -> Backend:
    control = cluster.spec.control
    if control.backend == "subprocess":
        return SubprocessBackend(log_dir, cluster.devices)
    if control.ray_address is None:
        prepare_local_ray(cluster.spec.security.tls, control.devices)
    from cluster.backends.ray_backend import (  # noqa: PLC0415 (importing Ray takes almost a second)
        RayBackend,
    )

    return RayBackend(
        log_dir,
        ray_base(),
        address=control.ray_address,
        cpus=needed_cpus(cluster),
        gpus=len(cluster.devices),
        place_timeout_s=control.start_timeout_s,
    )


@asynccontextmanager
async def running_cluster(
    spec: ClusterSpec, progress: Progress, source: SpecSource | None = None
) -> AsyncIterator[Controller]:
    """Yields once everything is ready, and stops everything on exit, even if the start failed. `source`: the origin of
    `spec`, for `tandem apply`."""
    state_file.refuse_second(spec.name)
    with state_file.written(state_file.starting(spec.name)):
        cluster = with_free_ports(await asyncio.to_thread(resolve, spec, progress))
        async with _running(cluster, progress, source or SpecSource(spec, {})) as controller:
            yield controller


@asynccontextmanager
async def _running(cluster: ResolvedCluster, progress: Progress, source: SpecSource) -> AsyncIterator[Controller]:
    spec = cluster.spec
    log_dir = state_file.new_log_dir(spec.name)
    controller = Controller(cluster, make_backend(cluster, log_dir), run_base(spec.name), log_dir, source)
    try:
        progress(f"starting the cluster ({spec.control.backend})")
        await controller.start()
        addresses = {
            "admin": controller.admin_address,
            "http": controller.http_address,
            "grpc": controller.grpc_address,
        }
        state = state_file.this_process(
            spec.name,
            **addresses,
            tls=spec.security.tls.model_dump() if spec.security.tls is not None else None,
            edge_ca=spec.router.tls.cert if spec.router.tls is not None else None,
        )
        with state_file.written(state):
            await controller.wait_ready(progress)
            yield controller
    except TandemError:
        if log_dir.is_dir():
            progress(f"the logs are in {log_dir}")
        raise
    finally:
        await controller.close()


def run_interruptible(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main` and returns its exit code. The first SIGINT or SIGTERM cancels it, for a clean end with code 0; the
    second ends this process immediately, and its children die with it."""

    async def run() -> int:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        interrupted = False

        def stop() -> None:
            nonlocal interrupted
            interrupted = True
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signum)
                signal.signal(signum, signal.SIG_DFL)
            task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop)
        try:
            return await task
        except asyncio.CancelledError:
            return 0 if interrupted else 1

    return asyncio.run(run())
