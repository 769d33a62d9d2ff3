"""Files that are replaced whole, and the folder for files that can be made again."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Writes a file of mode 0600. A reader sees the old content or the new, if `is_durable` even after a power failure.

    Raises OSError, and leaves the old content.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if is_durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Makes the file's content durable."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def existing(path: Path) -> Path:
    """The path, or its nearest parent that exists: its disk is the one that the path will be on."""
    return path if path.exists() else existing(path.parent)


def cache_dir() -> Path:
    """The folder for models, compiled kernels and other artefacts that Tandem can recreate: `TANDEM_CACHE`, or `tandem`
    in the user's cache folder."""
    own = os.environ.get("TANDEM_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
