"""Host memory that this process may still allocate, and how a failed allocation shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """The minimum of the machine's available memory and what each limiting control group leaves."""
    return min([psutil.virtual_memory().available, *_left_by_cgroups(cgroups, own)])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's error on a GPU, the untyped one of its CPU allocator, or Python's own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or "allocate memory" in str(error))
    )


def return_unused() -> None:
    """Returns a GPU's memory that torch keeps for later allocations."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _left_by_cgroups(cgroups: Path, own: Path) -> Iterator[int]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # no control groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _left(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _left(
                cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """What the group and its ancestors leave. In a container the path may name groups that are not visible."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        try:
            allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # The kernel reclaims the page cache before it refuses memory.
            yield max(0, allowed - used + int(statistics.get(reclaimable, 0)))
        except (OSError, ValueError):
            pass  # no such group, or no limit ("max")
        if folder == root:
            return


def leaves_device_unusable(error: Exception, *, on_device: bool) -> bool:
    """Whether every later call may fail too, or hang, as after most errors of a GPU."""
    return on_device and isinstance(error, RuntimeError) and not is_out_of_memory(error)
