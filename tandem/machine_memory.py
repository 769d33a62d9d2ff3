"""Host memory that this machine, or the control groups of this process, still have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """The minimum of the machine's available memory and what each limiting control group leaves."""
    return min([psutil.virtual_memory().available, *_left_by_cgroups(cgroups, own)])


def _left_by_cgroups(cgroups: Path, own: Path) -> Iterator[int]:
    try:
        lines = own.read_text().splitlines()
    except (OSError, ValueError):
        return  # no control groups
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers == "":
            yield from _left(cgroups, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _left(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _left(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """What the group and its ancestors leave. In a container the path may name groups that are not visible. `prefix`:
    of the statistics that count the groups below too."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        try:
            allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # The kernel reclaims the page cache, also what was read twice, before it refuses memory.
            cached = sum(int(statistics.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
            yield max(0, allowed - used + cached)
        except (OSError, ValueError):
            pass  # no such group, or no limit ("max")
        if folder == root:
            return
