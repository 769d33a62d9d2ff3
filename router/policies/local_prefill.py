"""Conditional disaggregation: when a decode worker prefills a request itself though there are prefill workers."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.costs import handoff_s, prefill_s
from router.policies.filters import HasPrefillRoom
from router.policies.types import Candidate, PlacementQuery

# What a handoff may cost in time, for it leaves the requests that decode, and those about to, alone.
CLEARLY_SOONER = 1.25
CLEARLY_SOONER_S = 0.025


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """In `PlacementQuery`, `prefill_s` is when the soonest prefill worker would be done."""

    max_tokens: int  # so few uncached tokens stay local whatever the load
    busy_max_tokens: int  # being prefilled on a decode worker, this request's among them, while others decode there
    idle_room: HasPrefillRoom  # while none do
    predicts: bool  # otherwise only `max_tokens` counts

    def takes(self, query: PlacementQuery, decode: Candidate) -> bool:
        return self.is_short(query, decode) or (self.is_sooner(query, decode) and self.spares_decodes(query, decode))

    def is_short(self, query: PlacementQuery, decode: Candidate) -> bool:
        return decode.uncached_tokens(query) <= self.max_tokens

    def is_sooner(self, query: PlacementQuery, decode: Candidate) -> bool:
        """Clearly, by the prediction."""
        if not self.predicts or query.prefill_s is None:
            return False
        return prefill_s(query, decode) * CLEARLY_SOONER + CLEARLY_SOONER_S <= handoff_s(query, decode, query.prefill_s)

    def stands_in(self, query: PlacementQuery, decode: Candidate) -> bool:
        """For prefill workers that have no room: where it is no later than waiting for them."""
        if not self.predicts or query.prefill_s is None or not self.spares_decodes(query, decode):
            return False
        return prefill_s(query, decode) <= handoff_s(query, decode, query.prefill_s)

    def spares_decodes(self, query: PlacementQuery, decode: Candidate) -> bool:
        if not decode.running_requests:
            return self.idle_room.keep(query, decode)
        return decode.outstanding_tokens + decode.uncached_tokens(query) <= self.busy_max_tokens
