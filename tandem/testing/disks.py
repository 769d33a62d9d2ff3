"""Small file systems that can be filled. On Linux, for root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class SmallDisk:
    path: Path

    @property
    def _filler(self) -> Path:
        return self.path / ".filler"

    def fill(self) -> None:
        """Until not one byte is left."""
        with suppress(OSError), open(self._filler, "ab", buffering=0) as file:
            while file.write(b"x" * _AT_ONCE):
                pass

    def free(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mounts one at `path`, which it creates. Raises PermissionError if this process may not."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        raise PermissionError("mounting needs root")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
