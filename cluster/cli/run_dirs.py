"""Private folders for sockets and launch files: short enough for unix sockets, and named after the owner's pid."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from cluster.cli.state_file import owner_runs
from tandem.errors import ConfigError

UNIX_PATH_BYTES = 107
SOCKET_NAME_BYTES = 40  # length of a worker's run folder and socket below the cluster's folder


def private_base() -> Path:
    """This user's folder, with mode 0700. Raises ConfigError if others can access it, or it cannot be created."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "tandem" if runtime else _in_tmp()
    return _private(base)


def run_base(cluster: str) -> Path:
    """The folder for the run folders of this process's cluster. Removes those of dead processes first.

    Raises ConfigError if the path is too long for unix sockets.
    """
    base = private_base()
    sweep(base)
    return _fresh(_short_enough(base / f"{cluster[:16]}-{os.getpid()}"))


def lasting_base(cluster: str) -> Path:
    """As `run_base`, for a cluster whose workers may outlive this process: the next one uses the same folder."""
    return _short_enough(private_base() / f"{cluster[:16]}-lasting")


def _short_enough(own: Path) -> Path:
    if len(os.fsencode(own)) + SOCKET_NAME_BYTES > UNIX_PATH_BYTES:
        raise ConfigError(f"run folder: {own} is too long for unix sockets: set XDG_RUNTIME_DIR to a shorter path")
    return own


def ray_base() -> Path:
    """Ray's temporary folder, always below /tmp: the paths of Ray's sockets add about 65 bytes."""
    base = _private(_in_tmp())
    sweep(base)
    return _fresh(base / f"ray-{os.getpid()}")


def sweep(base: Path) -> None:
    """Removes folders `NAME-PID` of dead processes, which a killed controller leaves behind."""
    for folder in base.iterdir():
        if owner_runs(folder) is False:
            shutil.rmtree(folder, ignore_errors=True)


def _fresh(own: Path) -> Path:
    """Removes the folder of an earlier process with the same pid, which is common in containers."""
    shutil.rmtree(own, ignore_errors=True)
    return own


def _in_tmp() -> Path:
    return Path(f"/tmp/tandem-{os.getuid()}")


def _private(base: Path) -> Path:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
    except OSError as error:
        raise ConfigError(
            f"run folder: cannot create {base} ({error.strerror}): set XDG_RUNTIME_DIR to a folder of yours"
        ) from None
    # In /tmp, another user may have created the folder or a link first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"run folder: expected {base} to be a folder that only you can access: remove it, or set XDG_RUNTIME_DIR"
        )
    return base
