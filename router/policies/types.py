"""What routing policies see and say: Filter → Score → Pick over candidates. Pure values, shared with the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from router.policies.pace import START_PACE, Pace

WorkerEpoch = tuple[str, int]  # worker id, epoch


class PlacementQuery(
    msgspec.Struct, frozen=True
):  # as Candidate made for every decision: cheaper than a frozen dataclass
    """A request in the eyes of a policy, and what the choice so far has settled."""

    prompt_tokens: int
    excluded: frozenset[str] = frozenset()  # workers that refused it just now, or failed it
    answer_tokens: int = 0  # how long its answer is expected to be
    session: bytes | None = None  # digest of what the client names its session by
    number: int = 0  # so many requests were placed before it
    prefill_s: float | None = None  # until the prefill worker that is soonest would have computed it
    decode: Candidate | None = None  # while the prefill worker is chosen: where the blocks go


class Candidate(msgspec.Struct, frozen=True):
    """A live worker as seen for one request. Loads are the worker's last report and what of ours is not in it yet."""

    worker_id: str
    epoch: int
    cached_tokens: int
    dispatched_tokens: int  # prompt tokens this router gave it that are not yet computed
    outstanding_tokens: int  # prompt tokens it has not yet computed, whichever router gave it them
    running_requests: int
    free_blocks: int  # free or evictable
    total_blocks: int
    reaches: frozenset[WorkerEpoch] | None = None  # lives it has good links to; None: it has not said
    pace: Pace = START_PACE
    transfer_to: Mapping[WorkerEpoch, float] = msgspec.field(default_factory=dict)  # seconds per token, where measured

    @property
    def worker_epoch(self) -> WorkerEpoch:
        return self.worker_id, self.epoch

    def can_reach(self, other: Candidate) -> bool:
        return self.reaches is None or other.worker_epoch in self.reaches

    def uncached_tokens(self, query: PlacementQuery) -> int:
        """Tokens this worker would compute. A prompt that is cached whole still has its last token computed."""
        left = query.prompt_tokens - self.cached_tokens
        return left if left > 1 else 1  # asked hundreds of times for a decision: twice as fast as `max`


class Filter(Protocol):
    def keep(self, query: PlacementQuery, candidate: Candidate) -> bool: ...


class Score(Protocol):
    """Points in [0, 1] for each candidate, in their order; more is better."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]: ...


class Pick(Protocol):
    def pick(self, candidates: Sequence[Candidate], points: Sequence[float]) -> Candidate:
        """One of `candidates`, which is not empty."""
        ...


class PlacementReason(StrEnum):
    """Why a request is prefilled where it is; a metric label. Those of handoffs say why it is not prefilled locally."""

    LOCAL_CONFIGURED = "local_configured"  # disaggregation: never
    LOCAL_NO_PREFILL_WORKER = "local_no_prefill_worker"
    LOCAL_PREFILL_FAILED = "local_prefill_failed"  # every prefill worker failed this request
    LOCAL_SHORT_SUFFIX = "local_short_suffix"  # next to nothing to compute
    LOCAL_SOONER = "local_sooner"  # by the prediction, clearly
    LOCAL_PREFILL_FULL = "local_prefill_full"  # no prefill worker has room, the decode worker has
    HANDOFF_CONFIGURED = "handoff_configured"  # disaggregation: always
    HANDOFF_LONG_SUFFIX = "handoff_long_suffix"  # too long for a policy that predicts nothing
    HANDOFF_AS_SOON = "handoff_as_soon"  # local prefill would not be clearly sooner
    HANDOFF_SPARES_DECODES = "handoff_spares_decodes"  # it would be, but would hold up those that decode there


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
