"""What one request took: when its parts were, what was cached, how much KV moved for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.prefix_index.mirror import WorkerKey
from router.requests.events import HandoffReported, Token
from router.requests.output import Final, Timeline, Usage
from tandem.request import FinishReason


@dataclass(slots=True)
class ProposalCounts:
    """Tokens that workers proposed, over all attempts."""

    proposed: int = 0
    accepted: int = 0
    proposed_prediction: int = 0  # of these, from the client's prediction
    accepted_prediction: int = 0
    _end: int = 0  # of the answer with the last step's accepted tokens
    _from_prediction: bool = False  # were those

    def add(self, token: Token, answer_tokens: int) -> None:
        """`token`: the first of a step with proposals, after so many tokens of the answer."""
        self.proposed += token.proposed_tokens
        self.accepted += token.accepted_tokens
        self._end, self._from_prediction = answer_tokens + token.accepted_tokens, token.from_prediction
        if token.from_prediction:
            self.proposed_prediction += token.proposed_tokens
            self.accepted_prediction += token.accepted_tokens

    def of_answer(self, answer_tokens: int) -> tuple[int, int, int, int]:
        """Accepted and unused ones, of all and of the prediction. A stop string may have ended the answer before the
        last step's accepted tokens."""
        beyond = max(0, self._end - answer_tokens)
        accepted = self.accepted - beyond
        predicted = self.accepted_prediction - (beyond if self._from_prediction else 0)
        return accepted, self.proposed - accepted, predicted, self.proposed_prediction - predicted


@dataclass(slots=True)
class AttemptTimes:
    """When the parts of one attempt were, on the router's clock."""

    dispatched_s: float
    prefill_sent_s: float | None = None
    first_token_s: float | None = None
    joined_s: float | None = None


@dataclass(slots=True)
class RunTimeline:
    """Times are the router's clock's. Of several attempts, the one that brought the answer's first token counts."""

    received_s: float
    dispatched_s: float
    first_token_s: float
    last_token_s: float
    joined_s: float | None = None
    prefilled_by: WorkerKey | None = None  # sampled the answer's first token; None: the decode worker did
    cached_prefill: int = 0  # tokens
    cached_decode: int = 0
    moved_bytes: int = 0
    moved_blocks: int = 0
    proposals: ProposalCounts = field(default_factory=ProposalCounts)

    @classmethod
    def open(cls, now_s: float) -> RunTimeline:
        return cls(received_s=now_s, dispatched_s=now_s, first_token_s=now_s, last_token_s=now_s)

    def first_token(self, cached_tokens: int, prefill: WorkerKey | None, now_s: float) -> None:
        """`prefill` None: the decode worker computed the prompt."""
        self.first_token_s = now_s
        self.prefilled_by = prefill
        if prefill is None:
            self.cached_decode = cached_tokens
        else:
            self.cached_prefill = cached_tokens

    def moved(self, event: HandoffReported) -> None:
        self.moved_bytes += event.moved_bytes
        self.moved_blocks += event.moved_blocks

    def joined(self, at_s: float) -> None:
        """The request decodes. Later attempts do not change this."""
        if self.joined_s is None:
            self.joined_s = at_s

    def usage(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        cached = self.cached_decode if self.prefilled_by is None else self.cached_prefill
        return Usage(prompt_tokens, completion_tokens, cached, *self.proposals.of_answer(completion_tokens))

    def final(self, reason: FinishReason, usage: Usage, decode: WorkerKey | None, now_s: float) -> Final:
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
            prefill_worker="" if self.prefilled_by is None else self.prefilled_by.worker_id,
            decode_worker="" if decode is None else decode.worker_id,
        )
        return Final(reason, usage, timeline)
