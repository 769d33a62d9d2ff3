"""Whether a model has room on its disk, asked before the first byte of it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from tandem.errors import InsufficientMemory
from tandem.files import existing


def check_room(folder: Path, model: str, needed_bytes: int, volume_bytes: int | None = None) -> None:
    """Raises InsufficientMemory if `needed_bytes` more do not fit.

    `volume_bytes`: what the volume with `folder` may hold if its file system does not say so, such as a Kubernetes
    emptyDir with a size limit, whose pod is evicted beyond it.
    """
    free, remedy = shutil.disk_usage(existing(folder)).free, "free some space or set TANDEM_CACHE to another folder"
    if volume_bytes is not None and (left := max(0, volume_bytes - _used_bytes(folder))) < free:
        free, remedy = left, f"the volume has {_size(volume_bytes)}: make it larger (the chart's models.emptyDirSize)"
    if needed_bytes > free:
        raise InsufficientMemory(
            f"model: expected {_size(needed_bytes)} free in {folder} for {model}, got {_size(free)}; {remedy}",
            field="model",
        )


def _used_bytes(folder: Path) -> int:
    """Not of links: the hub client's snapshots are links to its blobs."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
