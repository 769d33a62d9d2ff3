"""The rules of placement: filter → score → pick for one role, both roles of a request, and the policies by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from router.policies.filters import HasPrefillRoom, NotExcluded
from router.policies.local_prefill import LocalPrefill
from router.policies.predicted_times import prefill_s
from router.policies.scores import (
    CachedPrefix,
    ExpectedTime,
    ExpectedTtft,
    FewestRunning,
    FewestTokens,
    FreeBlocks,
    InTurn,
    SessionAffinity,
    Shuffled,
    SmallBatch,
)
from router.policies.types import Candidate, Filter, Pick, Placement, PlacementQuery, PlacementReason, Score, WaitReason
from tandem.config.router import Disaggregation, PolicyName, RouterSpec

Weighted = tuple[tuple[Score, float], ...]


@dataclass(frozen=True, slots=True)
class HighestScore:
    """The most points; then the fewest running requests; then the first id, for repeatable choices."""

    def pick(self, candidates: Sequence[Candidate], points: Sequence[float]) -> Candidate:
        most = max(points)
        ties = [each for each, its_points in zip(candidates, points, strict=True) if its_points == most]
        return min(ties, key=lambda each: (each.running_requests, each.worker_id))


@dataclass(frozen=True, slots=True)
class Policy:
    filters: tuple[Filter, ...]
    scores: Weighted
    picker: Pick = HighestScore()

    def choose(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> Candidate | None:
        kept = candidates
        for each in self.filters:
            kept = [candidate for candidate in kept if each.keep(query, candidate)]
        if not kept:
            return None
        totals = [0.0] * len(kept)
        for score, weight in self.scores:
            totals = [total + weight * points for total, points in zip(totals, score.points(query, kept), strict=True)]
        return self.picker.pick(kept, totals)


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Chooses the decode worker, then the prefill worker or local prefill."""

    decode: Policy
    prefill: Policy
    prefill_room: HasPrefillRoom
    disaggregation: Disaggregation
    local: LocalPrefill

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        """The workers for the request now, or why it waits."""
        if not decode_workers:
            return WaitReason.NO_DECODE_WORKER
        if self.disaggregation is Disaggregation.NEVER:
            prefill_workers = ()
        query = self._with_prefill_time(query, prefill_workers)
        decode = self.decode.choose(query, decode_workers)
        if decode is None:
            return WaitReason.DECODE_REFUSED
        reachable = [each for each in prefill_workers if each.can_reach(decode)]
        if len(reachable) < len(prefill_workers):
            query = self._with_prefill_time(query, reachable)
        return self._place_prefill(replace(query, decode=decode), decode, reachable)

    def _place_prefill(
        self, query: PlacementQuery, decode: Candidate, prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        local = self._local_reason(query, decode, prefill_workers)
        if local is not None:
            if not self.prefill_room.keep(query, decode):
                return WaitReason.PREFILL_FULL
            return Placement(decode, None, local)
        prefill = self.prefill.choose(query, prefill_workers)
        if prefill is not None and query.is_prompt_alone:
            return Placement(prefill, None, PlacementReason.PROMPT_ALONE)
        if prefill is not None:
            return Placement(decode, prefill, self._handoff_reason(query, decode))
        if self.disaggregation is Disaggregation.AUTO and self.local.stands_in(query, decode):
            return Placement(decode, None, PlacementReason.LOCAL_PREFILL_FULL)
        return WaitReason.PREFILL_FULL

    def another_decode(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill: Candidate
    ) -> Candidate | None:
        """Another decode worker for the same prefill worker, after one refused. None if there is none."""
        query = self._with_prefill_time(query, [prefill])
        return self.decode.choose(query, [each for each in decode_workers if prefill.can_reach(each)])

    def next_decode(self, query: PlacementQuery, decode_workers: Sequence[Candidate]) -> Candidate | None:
        """The decode worker to move a decoding request to. None if none is left."""
        return self.decode.choose(query, decode_workers)

    def _with_prefill_time(self, query: PlacementQuery, prefill_workers: Sequence[Candidate]) -> PlacementQuery:
        times_s = (prefill_s(query, each) for each in prefill_workers if each.worker_id not in query.excluded)
        return replace(query, prefill_s=min(times_s, default=None))

    def _local_reason(
        self, query: PlacementQuery, decode: Candidate, prefill_workers: Sequence[Candidate]
    ) -> PlacementReason | None:
        if self.disaggregation is Disaggregation.NEVER:
            return PlacementReason.LOCAL_CONFIGURED
        if not prefill_workers:
            return PlacementReason.LOCAL_NO_PREFILL_WORKER
        if query.prefill_s is None:
            return PlacementReason.LOCAL_PREFILL_FAILED
        if self.disaggregation is Disaggregation.ALWAYS:
            return None
        if self.local.is_short(query, decode):
            return PlacementReason.LOCAL_SHORT_SUFFIX
        return PlacementReason.LOCAL_SOONER if self.local.takes(query, decode) else None

    def _handoff_reason(self, query: PlacementQuery, decode: Candidate) -> PlacementReason:
        if self.disaggregation is Disaggregation.ALWAYS:
            return PlacementReason.HANDOFF_CONFIGURED
        if not self.local.predicts:
            return PlacementReason.HANDOFF_LONG_SUFFIX
        sooner = self.local.is_sooner(query, decode)
        return PlacementReason.HANDOFF_SPARES_DECODES if sooner else PlacementReason.HANDOFF_AS_SOON


def named_policy(spec: RouterSpec, *, seed: int = 0) -> PlacementPolicy:
    """The policy that `router.policy` names: the default or a baseline.

    `seed` is for the policy `random`; routers of one cluster should have different seeds.
    """
    room = HasPrefillRoom(spec.max_prefill_tokens_in_flight)
    local = LocalPrefill(
        max_tokens=spec.local_prefill_max_tokens,
        busy_max_tokens=spec.local_prefill_busy_max_tokens,
        idle_room=room,
        predicts=spec.policy is PolicyName.EXPECTED_TTFT,
    )
    decode, prefill = _scores(spec.policy, None if spec.disaggregation is Disaggregation.ALWAYS else local, seed)
    return PlacementPolicy(
        decode=Policy((NotExcluded(),), decode),
        prefill=Policy((NotExcluded(), room), prefill),
        prefill_room=room,
        disaggregation=spec.disaggregation,
        local=local,
    )


def _scores(name: PolicyName, local: LocalPrefill | None, seed: int) -> tuple[Weighted, Weighted]:
    """Weighted scores of decode workers and of prefill workers.

    The small weights of free blocks, batches and affinity decide between workers with similar times: while a larger
    batch takes hardly longer, the noise in measured times would lead all requests to one worker.
    """
    affinity = (SessionAffinity(), 0.1)
    match name:
        case PolicyName.EXPECTED_TTFT:
            decode = (ExpectedTime(local), 1.0), (FreeBlocks(), 0.2), (SmallBatch(), 0.1), affinity
            return decode, ((ExpectedTtft(), 1.0), affinity)
        case PolicyName.LEAST_LOADED:
            return ((FewestRunning(), 1.0), (FreeBlocks(), 1.0)), ((FewestTokens(), 1.0),)
        case PolicyName.CACHE_ONLY:
            return ((CachedPrefix(), 1.0),), ((CachedPrefix(), 1.0),)
        case PolicyName.ROUND_ROBIN:
            return ((InTurn(), 1.0),), ((InTurn(), 1.0),)
        case PolicyName.RANDOM:
            return ((Shuffled(seed), 1.0),), ((Shuffled(seed), 1.0),)
