"""Time as a parameter. Production passes `SystemClock`; tests and the simulator pass a clock they control."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds. Only differences are meaningful; steps of the wall clock have no effect."""
        ...


class SystemClock:
    now_s = staticmethod(time.monotonic)  # no wrapper, because it is called for every token
