"""Time as a parameter. Production passes `SystemClock`, tests and the simulator pass a clock they turn by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds. Only differences mean anything; steps of the wall clock never show here."""
        ...


class SystemClock:
    now_s = staticmethod(time.monotonic)  # itself, for it is asked for every token
