"""The state file of a running cluster, in the user's state folder: commands find the cluster by it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tandem.errors import ConfigError, UnavailableError

KEPT_LOGS = 10


@dataclass(frozen=True, slots=True)
class ClusterState:
    name: str
    pid: int
    started: float  # the process's start time, which detects a reused pid
    admin: str  # this and the next two are empty during the start
    http: str
    grpc: str
    tls: dict[str, str] | None = None  # security.tls
    edge_ca: str | None = None  # PEM file with the CA of the routers' certificate; None: no TLS

    @property
    def is_starting(self) -> bool:
        """Whether the cluster has no addresses yet."""
        return not self.admin

    @property
    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            # A zombie keeps its pid and start time until it is reaped.
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False


def state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tandem"


def new_log_dir(cluster: str) -> Path:
    """The log folder of this process's cluster. Keeps the last KEPT_LOGS earlier ones."""
    logs = state_dir() / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in sorted(logs.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT_LOGS]:
        shutil.rmtree(old, ignore_errors=True)
    return logs / f"{cluster}-{os.getpid()}"


def read(name: str) -> ClusterState | None:
    """The live cluster with this name. Removes the file of a dead one."""
    path = state_dir() / f"{name}.json"
    try:
        state = ClusterState(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        path.unlink(missing_ok=True)
        return None
    if not state.is_alive:
        path.unlink(missing_ok=True)
        return None
    return state


def refuse_second(name: str) -> None:
    """Raises ConfigError if a cluster with this name is running."""
    if (state := read(name)) is not None:
        phase = "starting" if state.is_starting else "running"
        raise ConfigError(
            f"name: a cluster named {name!r} is {phase} (pid {state.pid}): stop it with Ctrl-C or "
            f"`kill {state.pid}`, or choose another --name",
            field="name",
        )


def find(name: str | None) -> ClusterState:
    """The cluster with this name, or the only one.

    Raises ConfigError if none or several match, UnavailableError if it is still starting.
    """
    names = sorted(path.stem for path in state_dir().glob("*.json"))
    alive = [state for found in names if (state := read(found)) is not None]
    listed = ", ".join(state.name for state in alive)
    matching = [state for state in alive if name in (None, state.name)]
    if not alive:
        raise ConfigError(
            "no cluster is running on this machine: start one with `tandem up`, or pass --address", field="--address"
        )
    if not matching:
        raise ConfigError(f"--cluster: expected a running cluster, got {name!r}; running: {listed}", field="--cluster")
    if len(matching) > 1:
        raise ConfigError(f"--cluster: several clusters are running ({listed}): choose one", field="--cluster")
    if matching[0].is_starting:
        raise UnavailableError(f"{matching[0].name} is still starting: try again in a moment", field="--cluster")
    return matching[0]


@contextmanager
def written(state: ClusterState) -> Iterator[None]:
    """The file exists inside the context."""
    folder = state_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{state.name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(state)))
    partial.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def starting(name: str) -> ClusterState:
    """The state of this process before its cluster has addresses."""
    return this_process(name, admin="", http="", grpc="")


def this_process(
    name: str, *, admin: str, http: str, grpc: str, tls: dict[str, str] | None = None, edge_ca: str | None = None
) -> ClusterState:
    pid = os.getpid()
    return ClusterState(name, pid, psutil.Process(pid).create_time(), admin, http, grpc, tls, edge_ca)
