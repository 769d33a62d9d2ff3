"""When a busy router writes: what arrives for a stream in between is one write, which lets the router catch up."""

from __future__ import annotations

import time
from collections.abc import Callable

LOAD_INTERVAL_S = 0.5  # how often the load is measured; a shorter peak is no reason to delay tokens
BUSY_SHARE = 0.75  # of the time: beyond this, no core is left to catch up with
PAUSE_S = 0.025  # between two writes of a busy router


class WritePauses:
    """Args: `busy_s`: CPU seconds of the event loop's thread."""

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, busy_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._now_s = now_s
        self._busy_s = busy_s
        self._measured_s, self._busy_then_s = now_s(), busy_s()
        self._is_busy = False
        self._written_s = 0.0

    def wrote(self) -> None:
        """Call after each write, of any stream."""
        now_s = self._written_s = self._now_s()
        if now_s - self._measured_s >= LOAD_INTERVAL_S:
            busy_s = self._busy_s()
            self._is_busy = busy_s - self._busy_then_s >= BUSY_SHARE * (now_s - self._measured_s)
            self._measured_s, self._busy_then_s = now_s, busy_s

    @property
    def pause_s(self) -> float:
        """How long a stream waits after a write of its own; 0 on a router that has time."""
        return PAUSE_S if self._is_busy else 0.0

    @property
    def left_s(self) -> float:
        """As `pause_s`, counted from the last write of any stream."""
        return max(0.0, self._written_s + PAUSE_S - self._now_s()) if self._is_busy else 0.0
