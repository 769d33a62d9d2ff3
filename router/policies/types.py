"""What routing policies see and say: Filter → Score → Pick over candidates. Pure values, shared with the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """A request in the eyes of a policy."""

    prompt_tokens: int
    excluded: frozenset[str] = frozenset()  # workers that refused it just now, or failed it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker as seen for one request. Loads are the worker's last report and what of ours is not in it yet."""

    worker_id: str
    epoch: int
    cached_tokens: int
    dispatched_tokens: int  # prompt tokens this router gave it that are not yet computed
    outstanding_tokens: int  # prompt tokens it has not yet computed, whichever router gave it them
    running_requests: int
    free_blocks: int  # free or evictable
    total_blocks: int
    reaches: frozenset[tuple[str, int]] | None = None  # lives it has good links to; None: it has not said

    def can_reach(self, other: Candidate) -> bool:
        return self.reaches is None or (other.worker_id, other.epoch) in self.reaches

    def uncached_tokens(self, ask: Ask) -> int:
        """Tokens this worker would compute. A prompt that is cached whole still has its last token computed."""
        return max(1, ask.prompt_tokens - self.cached_tokens)


class Filter(Protocol):
    def keep(self, ask: Ask, candidate: Candidate) -> bool: ...


class Score(Protocol):
    """Points in [0, 1] for each candidate, in their order; more is better."""

    def points(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]: ...


class Pick(Protocol):
    def pick(self, candidates: Sequence[Candidate], points: Sequence[float]) -> Candidate:
        """One of `candidates`, which is not empty."""
        ...


class PlacementReason(StrEnum):
    """Why a request went where it went; a metric label."""

    LOCAL_CONFIGURED = "local_configured"
    LOCAL_NO_PREFILL_WORKER = "local_no_prefill_worker"
    LOCAL_SHORT_SUFFIX = "local_short_suffix"
    LOCAL_PREFILL_FAILED = "local_prefill_failed"
    HANDOFF_CACHED_PREFIX = "handoff_cached_prefix"
    HANDOFF_LEAST_LOADED = "handoff_least_loaded"


class WaitReason(StrEnum):
    """Why a request stays in the queue."""

    NO_DECODE_WORKER = "no_decode_worker"
    DECODE_REFUSED = "decode_refused"
    PREFILL_FULL = "prefill_full"


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: prefilled locally on the decode worker."""

    decode: Candidate
    prefill: Candidate | None
    reason: PlacementReason

    @property
    def prefiller(self) -> Candidate:
        return self.prefill or self.decode
