"""Private folders for sockets and launch files: short enough for unix sockets, named after their owner's process."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import psutil

from tandem.errors import ConfigError

UNIX_PATH_BYTES = 107
SOCKET_NAME_BYTES = 40  # what a worker's run folder and socket add to a cluster's own folder


def private_base() -> Path:
    """This user's folder, mode 0700. Raises ConfigError when it is not, or cannot be made, the user's alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "tandem" if runtime else _in_tmp()
    return _private(base)


def run_base(cluster: str) -> Path:
    """Where this process's cluster keeps its run folders. What dead processes left behind is removed first.

    Raises ConfigError when its path would be too long for unix sockets.
    """
    base = private_base()
    sweep(base)
    own = _fresh(base / f"{cluster[:16]}-{os.getpid()}")
    if len(os.fsencode(own)) + SOCKET_NAME_BYTES > UNIX_PATH_BYTES:
        raise ConfigError(f"run folder: {own} is too long for unix sockets: set XDG_RUNTIME_DIR to a shorter folder")
    return own


def ray_base() -> Path:
    """Ray's temporary folder: always below /tmp, because Ray appends about 65 bytes to reach its sockets."""
    base = _private(_in_tmp())
    sweep(base)
    return _fresh(base / f"ray-{os.getpid()}")


def sweep(base: Path) -> None:
    """Removes folders `NAME-PID` whose process is gone, as a killed controller leaves them."""
    for folder in base.iterdir():
        pid = folder.name.rpartition("-")[2]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # in a container nobody may wait for it
    except psutil.NoSuchProcess:
        return False


def _fresh(own: Path) -> Path:
    """An earlier process may have had our pid: in a container the same one comes again and again."""
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
            f"run folder: {base} cannot be made ({error.strerror}): set XDG_RUNTIME_DIR to a folder of yours"
        ) from None
    # In /tmp anybody may have been there first, with a folder of theirs or with a link.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"run folder: expected {base} to be a folder that only you can enter: remove it, or set XDG_RUNTIME_DIR"
        )
    return base
