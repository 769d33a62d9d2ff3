"""Files that are replaced whole."""

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
