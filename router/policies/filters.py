"""Filters: which candidates may take a request."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.types import Candidate, PlacementQuery


@dataclass(frozen=True, slots=True)
class NotExcluded:
    """Excludes workers that just refused or failed this request."""

    def keep(self, query: PlacementQuery, candidate: Candidate) -> bool:
        return candidate.worker_id not in query.excluded


@dataclass(frozen=True, slots=True)
class HasPrefillRoom:
    """The worker's prompt tokens, from all routers, stay within the budget.

    A worker with no prompt of this router takes one of any length. Otherwise, other routers could starve a long prompt,
    and a late report could hold up the queue.
    """

    max_tokens: int

    def keep(self, query: PlacementQuery, candidate: Candidate) -> bool:
        if candidate.dispatched_tokens == 0:
            return True
        return candidate.outstanding_tokens + candidate.uncached_tokens(query) <= self.max_tokens
