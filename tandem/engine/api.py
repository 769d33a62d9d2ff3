"""What goes into the engine and what comes out. Torch-free: workers, tests and the simulator share these types.

The engine knows nothing of `kvtransfer`. It exposes *export* (an `EngineRequest` with `export_from_block` set reports
every finished range of blocks through a `KvExporter`, layer by layer, and keeps its blocks leased until
`release_export`) and *import* (`reserve` leases blocks, somebody else fills them, `join` starts decoding). The worker
joins the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem.engine.step_work import NO_WORK, StepWork
from tandem.errors import TandemError
from tandem.kvcache.block_pool import BlockCounts, CacheEvent
from tandem.kvcache.blockhash import HashKey
from tandem.kvcache.host_tier import NO_TIER, TierCounts
from tandem.request import FinishReason, SamplingParams
from tandem.sampling.sampler import TokenLogprob
from tandem.scheduler.plan import ExportRange


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt to answer. `export_from_block` set: compute the prompt and the first token only, and export the prompt's
    KV blocks from that logical block on (earlier ones are already where they must go). The prompt's last
    `answered_tokens` were generated elsewhere: penalties count them as answer."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    hash_key: HashKey
    use_prefix_cache: bool = True
    export_from_block: int | None = None
    answered_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks leased for a prompt whose KV will be imported. Logical block i of the prompt lives in physical block
    `block_ids[i]`; those before `first_missing_block` are cached here and must not be written."""

    request_id: str
    block_ids: tuple[int, ...]
    first_missing_block: int
    cached_tokens: int


class KvExporter(Protocol):
    """Called by every rank's runner inside a step, for its own shard. Must not block."""

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        """There are some."""
        ...

    def layer_done(self, layer: int) -> None:
        """This layer of the ranges that are not in the cache is in the pool, with all before it. Told of the last
        layer, and of others where enough was written since."""
        ...


class TokenOut(msgspec.Struct, frozen=True):  # made for each token, a tenth of a dataclass's time
    """One sampled token. `logprob` and `top` only when asked for. `cached_tokens` on a request's first token."""

    request_id: str
    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt's token with the logprob the model gave it, and the likeliest tokens in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a prompt's tokens from position `start` on; each position comes once."""

    request_id: str
    start: int
    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request left the engine: finished for `reason`, or failed with `error`. For an exporting request that went
    well there is an end too (reason None: its first token did not end it); its blocks stay leased until release."""

    request_id: str
    reason: FinishReason | None = None
    error: TandemError | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    blocks: BlockCounts
    reserved_requests: int = 0  # neither waiting nor running: somebody else fills their blocks
    host: TierCounts = NO_TIER


@dataclass(frozen=True, slots=True)
class StepResult:
    """`began`: requests whose prompt was computed for the first time."""

    tokens: tuple[TokenOut, ...] = ()
    ended: tuple[RequestEnd, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()
    work: StepWork = NO_WORK
    began: tuple[str, ...] = ()


__all__ = [
    "BlockCounts",
    "CacheEvent",
    "EngineLoad",
    "EngineRequest",
    "ExportRange",
    "KvExporter",
    "PromptScores",
    "RequestEnd",
    "Reservation",
    "ScoredToken",
    "StepResult",
    "StepWork",
    "TierCounts",
    "TokenLogprob",
    "TokenOut",
]
