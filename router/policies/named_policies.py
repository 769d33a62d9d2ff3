"""The policies that `router.policy` names: the default and the baselines."""

from __future__ import annotations

from router.policies.filters import HasPrefillRoom, NotExcluded
from router.policies.local_prefill import LocalPrefill
from router.policies.placement import PlacementPolicy, Policy
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
)
from router.policies.types import Score
from tandem.config.spec import Disaggregation, PolicyName, RouterSpec

Weighted = tuple[tuple[Score, float], ...]


def policy_profile(spec: RouterSpec, *, seed: int = 0) -> PlacementPolicy:
    """`seed` is for the policy `random`; routers of one cluster should have different seeds."""
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

    The small weights of free blocks and affinity decide between workers with similar times.
    """
    affinity = (SessionAffinity(), 0.1)
    match name:
        case PolicyName.EXPECTED_TTFT:
            return ((ExpectedTime(local), 1.0), (FreeBlocks(), 0.2), affinity), ((ExpectedTtft(), 1.0), affinity)
        case PolicyName.LEAST_LOADED:
            return ((FewestRunning(), 1.0), (FreeBlocks(), 1.0)), ((FewestTokens(), 1.0),)
        case PolicyName.CACHE_ONLY:
            return ((CachedPrefix(), 1.0),), ((CachedPrefix(), 1.0),)
        case PolicyName.ROUND_ROBIN:
            return ((InTurn(), 1.0),), ((InTurn(), 1.0),)
        case PolicyName.RANDOM:
            return ((Shuffled(seed), 1.0),), ((Shuffled(seed), 1.0),)
