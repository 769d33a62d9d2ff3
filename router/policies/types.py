"""Inputs and results of placement policies: Filter → Score → Pick over candidates. The simulator uses them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from router.policies.pace import START_PACE, Pace
from tandem.engine.api import Capability
from tandem.rpc.identity import WorkerEpoch


class PlacementQuery(
    msgspec.Struct, frozen=True
):  # as Candidate made for every decision: cheaper than a frozen dataclass
    """The request to place, and what earlier steps of the choice found."""

    prompt_tokens: int
    excluded: frozenset[str] = frozenset()  # ids of workers that just refused or failed it
    answer_tokens: int = 0  # expected length of the answer
    session: bytes | None = None  # digest of the client's session key
    number: int = 0  # requests placed before it
    is_prompt_alone: bool = False  # its answer is one token, which comes with the prompt
    prefill_s: float | None = None  # time until the soonest prefill worker would finish the prompt
    decode: Candidate | None = None  # the chosen decode worker, while the prefill worker is chosen


class Candidate(msgspec.Struct, frozen=True):
    """A worker that may take one request. Loads are its last report plus what this router has sent since."""

    worker_id: str
    epoch: int
    cached_tokens: int
    dispatched_tokens: int  # prompt tokens to compute, from this router
    outstanding_tokens: int  # prompt tokens to compute, from all routers
    running_requests: int
    free_blocks: int  # free or evictable
    total_blocks: int
    reaches: frozenset[WorkerEpoch] | None = None  # workers it has good links to; None: not reported
    pace: Pace = START_PACE
    transfer_to: Mapping[WorkerEpoch, float] = msgspec.field(default_factory=dict)  # seconds per token, where measured
    bounds_steps: bool = False  # prompts hardly delay its answers (engine.longest_step_s)
    lacks: frozenset[Capability] = frozenset()  # what its engine cannot do

    @property
    def worker_epoch(self) -> WorkerEpoch:
        return self.worker_id, self.epoch

    def can_reach(self, other: Candidate) -> bool:
        return self.reaches is None or other.worker_epoch in self.reaches

    def uncached_tokens(self, query: PlacementQuery) -> int:
        """Tokens this worker would compute. The last token of a fully cached prompt is computed too."""
        left = query.prompt_tokens - self.cached_tokens
        return left if left > 1 else 1  # twice as fast as `max`; called hundreds of times per decision


class Filter(Protocol):
    def keep(self, query: PlacementQuery, candidate: Candidate) -> bool: ...


class Score(Protocol):
    """Points in [0, 1] for each candidate, in the order given; more is better."""

    def points(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]: ...


class Pick(Protocol):
    def pick(self, candidates: Sequence[Candidate], points: Sequence[float]) -> Candidate:
        """Returns one of `candidates`, which is not empty."""
        ...


class PlacementReason(StrEnum):
    """Why a request is prefilled where it is; a metric label. HANDOFF_* say why it is not prefilled locally."""

    LOCAL_CONFIGURED = "local_configured"  # disaggregation: never
    LOCAL_NO_PREFILL_WORKER = "local_no_prefill_worker"
    LOCAL_PREFILL_FAILED = "local_prefill_failed"  # every prefill worker failed this request
    LOCAL_SHORT_SUFFIX = "local_short_suffix"  # at most router.local_prefill_max_tokens to compute
    LOCAL_SOONER = "local_sooner"  # predicted to be clearly sooner
    LOCAL_PREFILL_FULL = "local_prefill_full"  # only the decode worker has room
    PROMPT_ALONE = "prompt_alone"  # the prefill worker gives the whole answer
    HANDOFF_CONFIGURED = "handoff_configured"  # disaggregation: always
    HANDOFF_LONG_SUFFIX = "handoff_long_suffix"  # the policy predicts no times, and the suffix is not short
    HANDOFF_AS_SOON = "handoff_as_soon"  # local prefill would not be clearly sooner
    HANDOFF_SPARES_DECODES = "handoff_spares_decodes"  # local prefill would be, but would delay requests that decode


class WaitReason(StrEnum):
    """Why a request stays in the queue."""

    NO_DECODE_WORKER = "no_decode_worker"
    DECODE_REFUSED = "decode_refused"
    PREFILL_FULL = "prefill_full"


class PlacementRules(Protocol):
    """What the core asks where a request goes."""

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason: ...

    def another_decode(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill: Candidate
    ) -> Candidate | None: ...

    def next_decode(self, query: PlacementQuery, decode_workers: Sequence[Candidate]) -> Candidate | None: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen workers. `prefill` None: local prefill on the decode worker."""

    decode: Candidate
    prefill: Candidate | None
    reason: PlacementReason

    @property
    def prefiller(self) -> Candidate:
        return self.prefill or self.decode
