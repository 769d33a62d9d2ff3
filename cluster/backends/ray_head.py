"""`python -m cluster.backends.ray_head FOLDER --cpus N --gpus N`: a Ray cluster of this machine, a child of the keeper.

It outlives controllers, which join it at the address in `FOLDER/address`. If one of its processes dies, or no longer
answers, it says which and ends, and all that ran on it with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # not in its stubs
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

from cluster.backends import ray_orphans
from tandem.files import replace_file

ADDRESS_FILE = "address"
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; Tandem stores no objects
POLL_S = 0.2
PROBE_S = 1.0
SILENT_S = 6.0  # so long the GCS may not answer; it counts a raylet as dead after about as long
STOOD_S = 2.0  # between two looks: then this process stood still, and the GCS may have answered
PR_SET_CHILD_SUBREAPER = 36
SYSTEM_CONFIG = {
    "worker_niceness": 0,  # ranks would inherit the default, 15, and yield to every other process
    # Detect a frozen node in about 5 s instead of 65 s.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def disable_helpers() -> None:
    """Makes a local Ray cluster start without log monitor, autoscaler and API server.

    Tandem uses none of them, each takes a second of a core and 80 MB, and Ray has no option against them. If a Ray
    version names these methods differently, the helpers start.
    """
    for name in ("start_log_monitor", "start_monitor", "start_api_server"):
        if hasattr(Node, name):
            setattr(Node, name, _start_nothing)


def _start_nothing(node: Node, **settings: object) -> None:
    """Replaces a method that starts a process."""


def start(folder: Path, cpus: int, gpus: int) -> Node:
    """Raises what Ray raises if it cannot start."""
    disable_helpers()
    parameters = RayParams(
        node_ip_address="127.0.0.1",
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        temp_dir=str(folder),
        _system_config=SYSTEM_CONFIG,  # type: ignore[arg-type]  # of any values, as in ray.init
    )
    return Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)


def watch_orphans(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the process that ends Ray's others if this one is killed."""
    command = [
        sys.executable,
        "-I",
        "-S",
        ray_orphans.__file__,
        os.path.realpath(folder),
        str(os.getpid()),
        str(os.getppid()),
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def end(node: Node) -> None:
    """Leaves nothing: workers of a raylet that died are children of this process by now."""
    node.kill_all_processes(check_alive=False, allow_graceful=True)
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _ended(node: Node) -> str:
    """Which process of Ray ended; empty: all run."""
    for name, process in node.dead_processes():  # type: ignore[no-untyped-call]
        return f"Ray's {name} (pid {process.pid}) ended with exit code {process.poll()}"
    return ""


class Probe:
    """Asks the GCS each second whether it and the raylet live. In a thread: a call to a frozen GCS takes minutes."""

    def __init__(self, gcs_address: str) -> None:
        self._gcs_address = gcs_address
        self._answered_s = self._looked_s = time.monotonic()
        self._error = ""
        self._is_raylet_dead = False
        threading.Thread(target=self._run, daemon=True, name="probe").start()

    def silence(self) -> str:
        """Which part does not answer; empty: all do. Call it often."""
        if self._is_raylet_dead:
            return "Ray's raylet no longer answers"
        now_s = time.monotonic()
        if now_s - self._looked_s > STOOD_S:
            self._answered_s = now_s
        self._looked_s = now_s
        if now_s - self._answered_s > SILENT_S:
            return f"Ray's gcs_server has not answered for {SILENT_S:g} s{self._error}"
        return ""

    def _run(self) -> None:
        client = None
        while not self._is_raylet_dead:
            time.sleep(PROBE_S)
            try:
                client = client or GcsClient(address=self._gcs_address)
                nodes = client.get_all_node_info(timeout=PROBE_S)
                self._answered_s, self._error = time.monotonic(), ""
                self._is_raylet_dead = any(node.state == GcsNodeInfo.DEAD for node in nodes.values())
            except Exception as error:  # its client raises more than RayError
                self._error = f" ({type(error).__name__})"


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: sys.exit(0))
    orphans = watch_orphans(options.folder)
    node = start(options.folder, options.cpus, options.gpus)
    try:
        replace_file(options.folder / ADDRESS_FILE, node.gcs_address.encode(), is_durable=False)
        probe = Probe(node.gcs_address)
        while not (reason := _ended(node) or probe.silence()):
            time.sleep(POLL_S)
            reap(node, orphans)
        print(reason, file=sys.stderr)
        return 1
    finally:
        end(node)


def reap(node: Node, orphans: subprocess.Popen[bytes]) -> None:
    """Waits for processes that ended after their parent, but not for those that `node` started and waits for."""
    own = {info.process.pid for infos in node.all_processes.values() for info in infos} | {orphans.pid}
    for process in psutil.Process().children():
        if process.pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main())
