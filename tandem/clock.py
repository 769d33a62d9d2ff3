"""Time as a parameter. Production passes `SystemClock`, tests and the simulator pass a clock they turn by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds. Only differences mean anything; steps of the wall clock never show here."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()
