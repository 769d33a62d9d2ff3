"""Notices what ends an engine: a rank that dies, or a step that hangs for good. The worker is replaced then."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from tandem.config.launch import WorkerLaunch

ASK_EVERY_S = 1.0


class HangWatch:
    """`ask` makes the leader send a message, which it does between two steps; every message counts as progress.

    Time in which this process did not run either, as on a suspended host, does not count.
    """

    def __init__(self, ask: Callable[[], None], limit_s: float) -> None:
        self._ask = ask
        self._limit_s = limit_s
        self._silent_s = 0.0

    def heard(self) -> None:
        self._silent_s = 0.0

    def passed(self, elapsed_s: float, tick_s: float) -> bool:
        """Counts `elapsed_s` since the last call, which was due after `tick_s`. Returns whether the engine hangs."""
        if not self._silent_s:
            self._ask()
        self._silent_s += min(elapsed_s, 2 * tick_s)
        return self._silent_s > self._limit_s

    async def run(self) -> None:
        """Returns when the engine hangs."""
        tick_s, last_s = min(ASK_EVERY_S, self._limit_s / 4), time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            elapsed_s, last_s = time.monotonic() - last_s, time.monotonic()
            if self.passed(elapsed_s, tick_s):
                return


class RankEnds:
    """Of the ranks other than the leader, which is connected and says itself that it stops. Raises OSError if a rank
    has left no process id."""

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
