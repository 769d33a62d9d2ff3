"""The share of a trace's prompt tokens that an infinite cache would hit: the upper bound of every hit rate."""

from __future__ import annotations

from dataclasses import dataclass

from planner.traces.trace import TrafficTrace


@dataclass(frozen=True, slots=True)
class PrefixHits:
    prompt_tokens: int
    hit_tokens: int
    blocks: int
    unique_blocks: int

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def infinite_cache_hits(trace: TrafficTrace) -> PrefixHits:
    """Counts the leading blocks of each prompt that an earlier prompt had, at most the whole prompt."""
    total = int(trace.prompt_tokens.sum())
    if trace.prefixes is None:
        return PrefixHits(total, 0, 0, 0)
    seen: set[int] = set()
    hit_tokens = 0
    for index in range(len(trace)):
        ids = trace.prefixes.of(index).tolist()
        leading = next((at for at, block in enumerate(ids) if block not in seen), len(ids))
        hit_tokens += min(leading * trace.prefixes.block_tokens, int(trace.prompt_tokens[index]))
        seen.update(ids)
    return PrefixHits(total, hit_tokens, len(trace.prefixes.ids), len(seen))
