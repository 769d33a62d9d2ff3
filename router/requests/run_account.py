"""What one request took: when its parts were, what was cached, how much KV moved for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.requests.output import Final, Timeline, Usage
from tandem.request import FinishReason
from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.workers.fleet import Worker


@dataclass(slots=True)
class RunAccount:
    """Times are the router's clock's. Of several attempts, the one that brought the answer's first token counts."""

    received_s: float
    dispatched_s: float
    first_token_s: float
    last_token_s: float
    joined_s: float | None = None
    prefilled_by: Worker | None = None  # who sampled the answer's first token; None: a decode worker
    cached_prefill: int = 0  # tokens
    cached_decode: int = 0
    moved_bytes: int = 0
    moved_blocks: int = 0

    @classmethod
    def open(cls, now_s: float) -> RunAccount:
        return cls(received_s=now_s, dispatched_s=now_s, first_token_s=now_s, last_token_s=now_s)

    def first_token(self, token: worker_pb2.StepToken, prefill: Worker | None, now_s: float) -> None:
        """`prefill` None: computed by a decode worker."""
        self.first_token_s = now_s
        self.prefilled_by = prefill
        if prefill is None:
            self.cached_decode = token.cached_tokens
        else:
            self.cached_prefill = token.cached_tokens

    def moved(self, done: worker_pb2.HandoffDone) -> None:
        self.moved_bytes += done.bytes
        self.moved_blocks += done.blocks

    def joined(self, at_s: float) -> None:
        """It decodes; what comes later is another attempt's."""
        if self.joined_s is None:
            self.joined_s = at_s

    def usage(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        cached = self.cached_decode if self.prefilled_by is None else self.cached_prefill
        return Usage(prompt_tokens, completion_tokens, cached)

    def final(self, reason: FinishReason, usage: Usage, decode: Worker | None, now_s: float) -> Final:
        local = self.prefilled_by is None
        timeline = Timeline(
            queue_s=self.dispatched_s - self.received_s,
            prefill_s=self.first_token_s - self.dispatched_s,
            handoff_s=0.0 if local or self.joined_s is None else self.joined_s - self.first_token_s,
            decode_s=self.last_token_s - self.first_token_s,
            ttft_s=self.first_token_s - self.received_s,
            total_s=now_s - self.received_s,
            kv_bytes_moved=self.moved_bytes,
            kv_blocks_moved=self.moved_blocks,
            cached_tokens_prefill=self.cached_prefill,
            cached_tokens_decode=self.cached_decode,
            prefill_worker="" if self.prefilled_by is None else self.prefilled_by.key.worker_id,
            decode_worker="" if decode is None else decode.key.worker_id,
        )
        return Final(reason, usage, timeline)
