"""Says which resource of its machine a process has no more of while it runs: open files, disks, shared memory.

A message names the resource and what to do, once a minute while it lasts. Nothing else changes: what needs the resource
fails, is tried again, and works as soon as it is back.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

log = logging.getLogger(__name__)

CHECK_S = 1.0
REPEAT_S = 60.0
LEAST_FREE_BYTES = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class Resource(StrEnum):
    """A metric label."""

    FILES = "open_files"
    DISK = "disk"
    SHARED_MEMORY = "shared_memory"


class ResourceWatch:
    """`folders`: by the setting that moves each."""

    def __init__(self, folders: Mapping[str, Path], now_s: Callable[[], float] = time.monotonic) -> None:
        self.exhausted: frozenset[Resource] = frozenset()
        self._folders = dict(folders)
        self._now_s = now_s
        self._told_s: dict[tuple[Resource, str], float] = {}

    async def run(self) -> None:
        while True:
            self.note(await asyncio.to_thread(self.find))  # a disk may hang
            await asyncio.sleep(CHECK_S)

    def find(self) -> dict[tuple[Resource, str], str]:
        """What there is no more of, by name, with what to do."""
        found = {}
        if limit := _used_up_files():
            found[Resource.FILES, "open files"] = (
                f"none of {limit} is left, so new connections fail: raise `ulimit -n` (LimitNOFILE of a service, the "
                "runtime's ulimits of a container), or lower router.max_connections"
            )
        for setting, folder in self._folders.items():
            if _is_full(folder):
                found[Resource.DISK, f"the disk of {folder}"] = f"full: free space there, or move it with {setting}"
        if _is_full(SHARED_MEMORY):
            found[Resource.SHARED_MEMORY, str(SHARED_MEMORY)] = (
                "full: free space there, or make it larger (a container's `--shm-size`, the chart's node.sharedMemory)"
            )
        return found

    def note(self, found: Mapping[tuple[Resource, str], str]) -> None:
        self.exhausted = frozenset(kind for kind, _ in found)
        for (kind, name), what in found.items():
            if self._now_s() - self._told_s.get((kind, name), -REPEAT_S) >= REPEAT_S:
                self._told_s[kind, name] = self._now_s()
                log.error("%s: %s", name, what)
        for key in self._told_s.keys() - found.keys():
            del self._told_s[key]
            log.warning("%s: there is room again", key[1])


def _used_up_files() -> int:
    """The limit of open files if none is left; 0 if one is."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in _NO_FILES:
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0


def _is_full(folder: Path) -> bool:
    """False too if it is not there, or cannot tell."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < LEAST_FREE_BYTES or (found.f_files > 0 and found.f_favail == 0)


def log_folders() -> dict[str, Path]:
    """The folder of the file to which this process logs, if it is one."""
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return {"XDG_STATE_HOME": Path(os.readlink("/proc/self/fd/2")).parent}
    return {}


def shortage(error: OSError) -> str:
    """The error's text, with what to do if the machine has no more of a resource."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "a folder of this process"
        return f"the disk is full ({where}): free space there"
    if error.errno in _NO_FILES:
        return "no open file is left: raise `ulimit -n`"
    return str(error)
