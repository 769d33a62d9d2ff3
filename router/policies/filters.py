"""Filters: which candidates may take a request at all."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.types import Candidate, PlacementQuery


@dataclass(frozen=True, slots=True)
class NotExcluded:
    """Not those that refused this request just now, or failed it."""

    def keep(self, query: PlacementQuery, candidate: Candidate) -> bool:
        return candidate.worker_id not in query.excluded


@dataclass(frozen=True, slots=True)
class HasPrefillRoom:
    """Within its budget of prompt tokens, whichever router they came from. A worker that has none of ours takes one
    prompt of any length: else a long one could be starved by other routers, and a late report hold back the queue."""

    max_tokens: int

    def keep(self, query: PlacementQuery, candidate: Candidate) -> bool:
        if candidate.dispatched_tokens == 0:
            return True
        return candidate.outstanding_tokens + candidate.uncached_tokens(query) <= self.max_tokens
