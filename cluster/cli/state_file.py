"""The state file of a running cluster, in the user's state folder: commands find the cluster by it."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tandem.errors import ConfigError, UnavailableError
from tandem.files import replace_file

KEPT_LOGS = 10


@dataclass(frozen=True, slots=True)
class ClusterState:
    name: str
    pid: int
    started: str  # `start_of` the process, which detects a reused pid
    admin: str = ""  # this and the next two are empty until its parts were started
    http: str = ""
    grpc: str = ""
    tls: dict[str, str] | None = None  # security.tls
    edge_ca: str | None = None  # PEM file with the CA of the routers' certificate; None: no TLS
    is_ready: bool = False  # it has been
    host: str = ""  # `host_id` of its process; empty in files of earlier releases

    @property
    def is_here(self) -> bool:
        """Whether its pid is of this host. A home folder may be shared by hosts and containers."""
        return self.host in ("", host_id())

    @property
    def is_alive(self) -> bool:
        """Whether it runs here."""
        if not self.is_here:
            return False
        try:
            return start_of(self.pid) == self.started
        except (FileNotFoundError, ProcessLookupError):
            return False


def host_id() -> str:
    """Hostname and PID namespace, which a reboot of a machine does not change."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def start_of(pid: int) -> str:
    """When the process started: boot and clock ticks since then, which no step of the wall clock changes.

    Raises FileNotFoundError or ProcessLookupError if there is none. A zombie counts as none.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = Path(f"/proc/{pid}/stat").read_text()  # proc_pid_stat(5): the name is in brackets and may hold any
    state, *numbers = status.rpartition(")")[2].split()
    if state in "ZX":
        raise ProcessLookupError(pid)
    return f"{boot}:{numbers[18]}"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises ConfigError naming the folder if it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"XDG_STATE_HOME: cannot write to {folder} ({error.strerror}): free space there or make it writable, or "
            "set XDG_STATE_HOME to another folder",
            field="XDG_STATE_HOME",
        ) from error


def state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tandem"


def new_log_dir(cluster: str) -> Path:
    """The log folder of this process's cluster. Keeps those of running clusters, and the last KEPT_LOGS others."""
    logs = state_dir() / "logs"
    with _writing(logs):
        ended = [path for path in logs.iterdir() if not owner_runs(path)]
        for old in sorted(ended, key=_changed_s)[:-KEPT_LOGS]:
            shutil.rmtree(old, ignore_errors=True)
    return logs / f"{cluster}-{os.getpid()}"


def owner_runs(folder: Path) -> bool | None:
    """Whether the process runs whose pid ends a folder's name; None: no pid ends it."""
    pid = folder.name.rpartition("-")[2]
    if not pid.isdecimal():
        return None
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE  # in a container, one may never be reaped
    except psutil.NoSuchProcess:
        return False


def _changed_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another start has removed it
        return 0.0


def read(name: str) -> ClusterState | None:
    """The live cluster with this name. Removes the file of one that died here."""
    path = _path(name)
    try:
        state = _load(path)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        path.unlink(missing_ok=True)
        return None
    if state.is_alive:
        return state
    if state.is_here:
        path.unlink(missing_ok=True)
    return None


def _path(name: str) -> Path:
    return state_dir() / f"{name}.json"


def _load(path: Path) -> ClusterState:
    """Raises FileNotFoundError; ValueError or TypeError for a broken file."""
    return ClusterState(**json.loads(path.read_text()))


def refuse_second(name: str) -> None:
    """Raises ConfigError if a cluster with this name is running."""
    if (state := read(name)) is not None:
        phase = "running" if state.is_ready else "starting"
        raise ConfigError(
            f"name: a cluster named {name!r} is {phase} (pid {state.pid}): stop it with Ctrl-C or "
            f"`kill {state.pid}`, or choose another --name",
            field="name",
        )


def find(name: str | None) -> ClusterState:
    """The cluster with this name, or the only one.

    Raises ConfigError if none or several match, UnavailableError if it has no addresses yet.
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
    if not matching[0].admin:
        raise UnavailableError(f"{matching[0].name} is still starting: try again in a moment", field="--cluster")
    return matching[0]


@contextmanager
def written(state: ClusterState) -> Iterator[None]:
    """The file exists inside the context, unless another process replaces it."""
    write(state)
    try:
        yield
    finally:
        with suppress(FileNotFoundError, ValueError, TypeError):
            if _owner(_load(_path(state.name))) == _owner(state):
                _path(state.name).unlink()


def _owner(state: ClusterState) -> tuple[str, int, str]:
    return state.host, state.pid, state.started


def write(state: ClusterState) -> None:
    path = _path(state.name)
    with _writing(path.parent):
        replace_file(path, json.dumps(asdict(state)).encode())


def of_this_process(name: str) -> ClusterState:
    """Before its cluster has addresses."""
    return ClusterState(name, os.getpid(), start_of(os.getpid()), host=host_id())
