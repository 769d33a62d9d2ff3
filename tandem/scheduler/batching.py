"""Static and dynamic batching, the baselines of continuous batching (docs/batching.md): when a collected batch begins.

A pure rule: the times come from the engine's clock, or from a simulation's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.engine import EngineSpec


@dataclass(frozen=True, slots=True)
class BatchRule:
    """`size`: most requests of a batch. `from_first`: the window begins with a batch's first request (dynamic), not
    with its last (static)."""

    size: int
    window_s: float
    from_first: bool

    @classmethod
    def of(cls, spec: EngineSpec) -> BatchRule | None:
        """None: continuous batching."""
        if spec.batching == "continuous":
            return None
        return cls(spec.max_running_requests, spec.collecting_s, from_first=spec.batching == "dynamic")

    def begins_s(self, arrivals_s: Sequence[float], *, is_full: bool) -> float:
        """When a batch of the requests that arrived at `arrivals_s`, in order, begins if no other one comes. `is_full`:
        the KV pool holds no further one."""
        first_s, last_s = arrivals_s[0], arrivals_s[-1]
        if is_full or len(arrivals_s) >= self.size:
            return last_s
        if self.from_first:
            return first_s + self.window_s
        # The bound matters only if requests come and are cancelled: in that time a batch fills, or one window is quiet.
        return min(last_s + self.window_s, first_s + self.size * self.window_s)
