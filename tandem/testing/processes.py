"""Whether processes have ended. They may do so between two questions about them."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Also if no parent has read its exit code: in a container, that may never happen. And if another process now has
    its number."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_lines(processes: Iterable[psutil.Process | int]) -> list[str]:
    """Those of processes, or process ids, that have not ended."""
    found = []
    for each in processes:
        try:
            process = psutil.Process(each) if isinstance(each, int) else each
            if not has_ended(process):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return found
