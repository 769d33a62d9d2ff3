"""Scores: how good a candidate is for a request, in one respect each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.types import Ask, Candidate


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Share of the prompt that needs no computing or sending."""

    def points(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        return [min(1.0, candidate.cached_tokens / max(1, ask.prompt_tokens)) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Share of the KV pool that is free or evictable."""

    def points(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        return [candidate.free_blocks / max(1, candidate.total_blocks) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class FewestRunning:
    """1 for an idle worker, less with every running request."""

    def points(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        return [1.0 / (1 + candidate.running_requests) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class LeastPrefillWork:
    """1 where the prompt would be computed soonest: own uncached tokens behind those that are already waiting."""

    def points(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        work = [candidate.outstanding_tokens + candidate.uncached_tokens(ask) for candidate in candidates]
        least = min(work, default=1)
        return [least / tokens for tokens in work]
