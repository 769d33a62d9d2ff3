"""`tandem up --detach` and `tandem down`: a cluster of this machine that no terminal keeps."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.cli import state_file
from cluster.cli.admin_client import Admin, controller_at, find_admin
from cluster.cli.console import console
from cluster.interruptible import INTERRUPTED
from tandem.config.observability import LogTarget
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, UnavailableError
from tandem.v1 import cluster_pb2

POLL_S = 0.1
STOP_S = 3600.0 + 300.0  # the longest drain (router.drain_timeout_s), then the end of every process
NOTICE_S = 30.0


def run_detached(spec: ClusterSpec) -> int:
    """Runs the same command again, without --detach, as a process that outlives this one. Returns when it serves.

    Ctrl-C or SIGTERM before that stops the cluster. Raises ConfigError.
    """
    if spec.observability.logs.target is LogTarget.STDOUT:
        raise ConfigError(
            "--detach: expected observability.logs.target: files, as nothing limits the size of an output that goes on",
            field="--detach",
        )
    name = spec.name
    state_file.refuse_second(name)  # the output file is that of the running one
    folder = state_file.state_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = folder / f"{name}.log"
    arguments = [each for each in sys.argv[1:] if each != "--detach"]
    interrupted = False

    def stop(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, stop)  # not an exception, which could hide the process that is being started
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while (state := state_file.read(name)) is None or not state.is_ready or state.pid != process.pid:
        if interrupted:  # nothing would show that the cluster goes on
            process.terminate()
            process.wait()
            return INTERRUPTED
        if process.poll() is not None:
            sys.stderr.write(output.read_text(errors="replace"))
            return process.returncode or 1
        time.sleep(POLL_S)
    scheme = "http" if state.edge_ca is None else "https"
    screen = console()
    routers = f"{scheme}://{state.http}/v1, gRPC {state.grpc}" if state.http else "no routers of its own"
    screen.print(f"[green]ready[/]: {routers} (process {state.pid})")
    screen.print(f"  output      {output}", markup=False, soft_wrap=True)
    screen.print("`tandem down` stops the cluster.", markup=False)
    return 0


def run_down(address: str | None, cluster: str | None, tls: Path | None) -> int:
    """Returns when the cluster has stopped, or on another machine when it stops. Ctrl-C ends only the wait."""
    state = state_file.find(cluster) if address is None else None
    asyncio.run(_stop(find_admin(address, cluster, tls)))
    began_s = time.monotonic()
    notice_s = began_s + NOTICE_S
    while state is not None and state.is_alive:
        now_s = time.monotonic()
        if now_s > began_s + STOP_S:
            raise UnavailableError(
                f"the cluster {state.name!r} (process {state.pid}) still runs after {STOP_S:g} s: see its logs"
            )
        if now_s >= notice_s:
            notice_s += NOTICE_S
            print(f"still draining after {now_s - began_s:.0f} s (Ctrl-C ends only this wait)", file=sys.stderr)
        time.sleep(POLL_S)
    print("stopped" if state is not None else "stopping")
    return os.EX_OK


async def _stop(admin: Admin) -> None:
    async with controller_at(admin) as stub:
        await stub.Shutdown(cluster_pb2.ShutdownRequest())
