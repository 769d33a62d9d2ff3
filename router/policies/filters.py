"""Filters: which candidates may take a request at all."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.types import Ask, Candidate


@dataclass(frozen=True, slots=True)
class NotExcluded:
    """Not those that refused this request just now, or failed it."""

    def keep(self, ask: Ask, candidate: Candidate) -> bool:
        return candidate.worker_id not in ask.excluded


@dataclass(frozen=True, slots=True)
class HasPrefillRoom:
    """Within its budget of our prompt tokens; an idle worker takes a prompt of any length. Reports of the worker do not
    count here: one that came late would hold back the queue for good."""

    max_tokens: int

    def keep(self, ask: Ask, candidate: Candidate) -> bool:
        dispatched = candidate.dispatched_tokens
        return dispatched == 0 or dispatched + candidate.uncached_tokens(ask) <= self.max_tokens
