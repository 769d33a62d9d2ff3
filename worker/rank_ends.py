"""Notices the end of a worker's ranks other than the leader, which is connected and says itself that it stops."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

from tandem.config.launch import WorkerLaunch


class RankEnds:
    """Raises OSError if a rank has left no process id."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self._has_ended = False
        self._open: list[int] = []  # process file descriptors, readable once the process has ended
        for rank in range(1, launch.tp):
            self._add(launch.rank_pid_file(rank))

    def _add(self, pid_file: Path) -> None:
        try:
            self._open.append(os.pidfd_open(int(pid_file.read_text())))
        except ProcessLookupError:
            self._has_ended = True

    def any_ended(self) -> bool:
        return self._has_ended or bool(select.select(self._open, [], [], 0)[0])

    async def wait(self) -> None:
        """Returns when one has ended; with one rank never."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for each in self._open:
            loop.add_reader(each, ended.set)
        try:
            if not self._has_ended:
                await ended.wait()
        finally:
            for each in self._open:
                loop.remove_reader(each)
