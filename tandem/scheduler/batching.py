"""Static and dynamic batching, the baselines of continuous batching (docs/batching.md): when a collected batch begins.

A pure rule: the times come from the engine's clock, or from a simulation's.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tandem.config.engine import EngineSpec
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.sequence import Sequence


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

    def next_batch(self, collected: SequenceOf[Sequence], room_blocks: int, block_tokens: int) -> tuple[int, float]:
        """How many of the collected requests, in order of arrival, make the next batch, and when it begins if none
        comes or leaves. `room_blocks`: of the KV pool."""
        count = self._fitting(collected, room_blocks, block_tokens)
        arrivals_s = [sequence.arrived_s for sequence in collected[:count]]
        return count, self.begins_s(arrivals_s, is_full=count < len(collected))

    def _fitting(self, collected: SequenceOf[Sequence], room_blocks: int, block_tokens: int) -> int:
        """The number of requests whose prompts fit beside each other; at least 1."""
        for number, sequence in enumerate(collected[: self.size]):
            room_blocks -= blocks_for(sequence.prompt_tokens + 1, block_tokens)
            if room_blocks < 0:
                return max(1, number)
        return min(self.size, len(collected))

    def begins_s(self, arrivals_s: SequenceOf[float], *, is_full: bool) -> float:
        """When a batch of the requests that arrived at `arrivals_s`, in order, begins if no other one comes. `is_full`:
        the KV pool holds no further one."""
        first_s, last_s = arrivals_s[0], arrivals_s[-1]
        if is_full or len(arrivals_s) >= self.size:
            return last_s
        if self.from_first:
            return first_s + self.window_s
        # The bound matters only if requests come and are cancelled: in that time a batch fills, or one window is quiet.
        return min(last_s + self.window_s, first_s + self.size * self.window_s)
