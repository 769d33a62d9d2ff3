"""A control group whose memory is limited, for processes that a test starts in it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Of the older control groups (`is_old`), or of the unified ones."""

    folder: Path
    is_old: bool

    def limit(self, size: int) -> None:
        """In bytes, without swap."""
        (self.folder / ("memory.limit_in_bytes" if self.is_old else "memory.max")).write_text(str(size))
        with suppress(OSError):  # a kernel without swap
            (self.folder / ("memory.swappiness" if self.is_old else "memory.swap.max")).write_text("0")

    def within(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` in the group."""
        return ["bash", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "bash", *command]

    @property
    def kills(self) -> int:
        """Processes that the kernel killed for memory."""
        text = (self.folder / ("memory.oom_control" if self.is_old else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Raises OSError where this process may make none."""
    is_old = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if is_old else ROOT) / f"tandem-test-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        group = MemoryGroup(folder, is_old)
        group.limit(1 << 40)  # fails where the group has no such limit
        seen = subprocess.run(group.within(["cat", "/proc/self/cgroup"]), capture_output=True, text=True, check=False)
        if not any(line.endswith(f":/{folder.name}") for line in seen.stdout.splitlines()):
            raise OSError(f"a process in {folder} does not find it: {seen.stdout or seen.stderr}")
        yield group
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Ends what is left in it."""
    for _ in range(100):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    folder.rmdir()
