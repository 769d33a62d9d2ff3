"""The share of a trace's prompt tokens that an infinite cache would hit: the upper bound of every hit rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.traces.trace import TrafficTrace


@dataclass(frozen=True, slots=True)
class PrefixHits:
    prompt_tokens: int
    hit_tokens: int

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def infinite_cache_hits(trace: TrafficTrace) -> PrefixHits:
    return PrefixHits(int(trace.prompt_tokens.sum()), int(cached_tokens(trace).sum()))


def cached_tokens(trace: TrafficTrace) -> NDArray[np.int64]:
    """The tokens of each prompt in leading blocks that an earlier prompt had, at most the whole prompt."""
    found = np.zeros(len(trace), np.int64)
    if trace.prefixes is None:
        return found
    seen: set[int] = set()
    for index in range(len(trace)):
        ids = trace.prefixes.of(index).tolist()
        leading = next((at for at, block in enumerate(ids) if block not in seen), len(ids))
        found[index] = min(leading * trace.prefixes.block_tokens, int(trace.prompt_tokens[index]))
        seen.update(ids)
    return found
