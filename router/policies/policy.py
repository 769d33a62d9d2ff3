"""Filter → Score → Pick for one role, and the placement of a request from the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.filters import HasPrefillRoom, NotExcluded
from router.policies.scores import CachedPrefix, FewestRunning, FreeBlocks, LeastPrefillWork
from router.policies.types import Ask, Candidate, Filter, Pick, Placement, PlacementReason, Score, WaitReason
from tandem.config import Disaggregation, RouterSpec


@dataclass(frozen=True, slots=True)
class HighestScore:
    """The most points; among equals the fewest running requests, then the first by name, so that it is repeatable."""

    def pick(self, candidates: Sequence[Candidate], points: Sequence[float]) -> Candidate:
        ranked = zip(points, candidates, strict=True)
        return min(ranked, key=lambda pair: (-pair[0], pair[1].running_requests, pair[1].worker_id))[1]


@dataclass(frozen=True, slots=True)
class Policy:
    filters: tuple[Filter, ...]
    scores: tuple[tuple[Score, float], ...]  # with weights
    picker: Pick = HighestScore()

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate | None:
        kept = [c for c in candidates if all(each.keep(ask, c) for each in self.filters)]
        if not kept:
            return None
        totals = [0.0] * len(kept)
        for score, weight in self.scores:
            for index, points in enumerate(score.points(ask, kept)):
                totals[index] += weight * points
        return self.picker.pick(kept, totals)


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Chooses the decode worker, then the prefill worker or local prefill."""

    decode: Policy
    prefill: Policy
    prefill_room: HasPrefillRoom
    disaggregation: Disaggregation
    local_prefill_max_tokens: int

    def place(
        self, ask: Ask, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        """Where the request goes now, or why it waits."""
        if not decode_workers:
            return WaitReason.NO_DECODE_WORKER
        decode = self.decode.choose(ask, decode_workers)
        if decode is None:
            return WaitReason.DECODE_REFUSED
        prefill_workers = [each for each in prefill_workers if each.can_reach(decode)]
        local = self._local_reason(ask, decode, prefill_workers)
        if local is not None:
            if not self.prefill_room.keep(ask, decode):
                return WaitReason.PREFILL_FULL
            return Placement(decode, None, local)
        prefill = self.prefill.choose(ask, prefill_workers)
        if prefill is None:
            return WaitReason.PREFILL_FULL
        cached = decode.cached_tokens or prefill.cached_tokens
        reason = PlacementReason.HANDOFF_CACHED_PREFIX if cached else PlacementReason.HANDOFF_LEAST_LOADED
        return Placement(decode, prefill, reason)

    def _local_reason(
        self, ask: Ask, decode: Candidate, prefill_workers: Sequence[Candidate]
    ) -> PlacementReason | None:
        if self.disaggregation is Disaggregation.NEVER:
            return PlacementReason.LOCAL_CONFIGURED
        if not prefill_workers:
            return PlacementReason.LOCAL_NO_PREFILL_WORKER
        if all(each.worker_id in ask.excluded for each in prefill_workers):
            return PlacementReason.LOCAL_PREFILL_FAILED
        short = decode.uncached_tokens(ask) <= self.local_prefill_max_tokens
        if self.disaggregation is Disaggregation.AUTO and short:
            return PlacementReason.LOCAL_SHORT_SUFFIX
        return None


def default_policy(spec: RouterSpec) -> PlacementPolicy:
    """Cache-aware, least-loaded: a whole cached prompt outweighs an idle worker."""
    room = HasPrefillRoom(spec.max_prefill_tokens_in_flight)
    return PlacementPolicy(
        decode=Policy((NotExcluded(),), ((CachedPrefix(), 2.0), (FewestRunning(), 1.0), (FreeBlocks(), 1.0))),
        prefill=Policy((NotExcluded(), room), ((LeastPrefillWork(), 1.0),)),
        prefill_room=room,
        disaggregation=spec.disaggregation,
        local_prefill_max_tokens=spec.local_prefill_max_tokens,
    )
