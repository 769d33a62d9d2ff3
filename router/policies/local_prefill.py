"""Conditional disaggregation: when a decode worker prefills a request although there are prefill workers."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.filters import HasPrefillRoom
from router.policies.predicted_times import handoff_s, prefill_s
from router.policies.types import Candidate, PlacementQuery

# Local prefill must be this much sooner than a handoff, because it delays the requests that decode there.
CLEARLY_SOONER = 1.25
CLEARLY_SOONER_S = 0.025


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """Reads `prefill_s` of the query: when the soonest prefill worker would finish the prompt."""

    max_tokens: int  # up to this many uncached tokens are prefilled locally at any load
    busy_max_tokens: int  # prompt tokens on a decode worker, with this request's, while they would delay its answers
    idle_room: HasPrefillRoom  # the limit while none decode there, or its steps are bounded
    predicts: bool  # False: only `max_tokens` counts

    def takes(self, query: PlacementQuery, decode: Candidate) -> bool:
        return self.is_short(query, decode) or (self.is_sooner(query, decode) and self.spares_decodes(query, decode))

    def is_short(self, query: PlacementQuery, decode: Candidate) -> bool:
        return decode.uncached_tokens(query) <= self.max_tokens

    def is_sooner(self, query: PlacementQuery, decode: Candidate) -> bool:
        """Whether local prefill is predicted to be clearly sooner."""
        if not self.predicts or query.prefill_s is None:
            return False
        return prefill_s(query, decode) * CLEARLY_SOONER + CLEARLY_SOONER_S <= handoff_s(query, decode, query.prefill_s)

    def stands_in(self, query: PlacementQuery, decode: Candidate) -> bool:
        """Whether the decode worker replaces full prefill workers: local prefill is no later than waiting for them."""
        if not self.predicts or query.prefill_s is None or not self.spares_decodes(query, decode):
            return False
        return prefill_s(query, decode) <= handoff_s(query, decode, query.prefill_s)

    def spares_decodes(self, query: PlacementQuery, decode: Candidate) -> bool:
        if not decode.running_requests:
            return self.idle_room.keep(query, decode)
        tokens = decode.outstanding_tokens + decode.uncached_tokens(query)
        if decode.bounds_steps and self.busy_max_tokens:  # a first prompt, of all routers', may be of any length
            return not decode.outstanding_tokens or tokens <= self.idle_room.max_tokens
        return tokens <= self.busy_max_tokens
