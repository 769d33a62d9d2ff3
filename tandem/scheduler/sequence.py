"""One request in the engine, and its stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.grammar.masks import GrammarRun
from tandem.kvcache.block_pool import BlockHold
from tandem.kvcache.blockhash import BlockHash, HashKey, hash_blocks
from tandem.request import SamplingParams
from tandem.speculation.proposers import Branch, Speculation
from tandem.token_history import TokenHistory


class SequenceStage(StrEnum):
    """WAITING → RUNNING → (gone), or → EXPORTED → (gone); RESERVED → RUNNING; RUNNING ↔ HELD → (gone). Preemption
    returns to WAITING. With static and dynamic batching COLLECTED → WAITING."""

    COLLECTED = "collected"  # for the next batch
    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"  # blocks leased, and filled by an import
    EXPORTED = "exported"  # finished; blocks leased until the reader is done
    HELD = "held"  # paused; to be moved or resumed


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one request.

    `tokens` is the prompt and the generated tokens; the KV of the first `computed` of them is in the pool. `committed`
    counts the leading blocks findable by hash, `exported_blocks` those that the receiver has or that were reported to
    it.
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    hash_key: HashKey
    block_tokens: int
    arrival: int
    arrived_s: float = 0.0
    use_prefix_cache: bool = True
    export_from_block: int | None = None
    answered_tokens: int = 0  # last prompt tokens, generated before by another engine
    grammar: GrammarRun | None = None  # of its answer
    stage: SequenceStage = SequenceStage.WAITING
    hold: BlockHold = BlockHold.USE
    blocks: list[int] = field(default_factory=list)
    passed_blocks: int = 0  # released leading blocks, behind every layer's window; their numbers are invalid
    branch_blocks: list[int] = field(default_factory=list)  # of the step under way
    computed: int = 0
    committed: int = 0
    exported_blocks: int = 0
    scored_tokens: int = 1  # leading prompt tokens without pending logprobs; the first never has one
    speculation: Speculation | None = None  # None: nothing is proposed for it
    last_step: int = 0  # number of the last step it ran in
    expected_cached_tokens: int = 0  # cached when it started to wait
    cached_tokens: int | None = None  # cached when it was first scheduled
    _hashes: list[BlockHash] = field(default_factory=list)
    _history: TokenHistory | None = None
    _history_tokens: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def may_use_cache(self) -> bool:
        """Whether cached blocks may replace its computation. A prompt with pending logprobs is computed from the
        start."""
        scores_wanted = self.sampling.prompt_logprobs is not None and self.scored_tokens < self.prompt_tokens
        return self.use_prefix_cache and not scores_wanted

    @property
    def takes_proposals(self) -> bool:
        """Not before its first token: a prompt's chunk costs more, and may be exported."""
        able = self.speculation is not None and not self.speculation.has_failed
        return able and self.generated > 0 and not self.is_exporting

    @property
    def held_blocks(self) -> list[int]:
        """Blocks it has not released."""
        return [*self.blocks[self.passed_blocks :], *self.branch_blocks]

    def drop_blocks(self) -> None:
        """After they were released."""
        self.blocks, self.passed_blocks, self.branch_blocks = [], 0, []

    def take_branch(self, branch: Branch, start: int) -> None:
        """Its tokens follow the one at `start`. A block that is findable by now ends there, and holds the same."""
        for place, block in enumerate(branch.blocks, start // self.block_tokens):
            if place >= self.committed:
                self.branch_blocks[self.branch_blocks.index(block)] = self.blocks[place]
                self.blocks[place] = block

    @property
    def is_exporting(self) -> bool:
        return self.export_from_block is not None

    @property
    def is_pinned(self) -> bool:
        """Whether its blocks may be being read, so they stay until the export is released."""
        return self.export_from_block is not None and self.exported_blocks > self.export_from_block

    @property
    def pending_tokens(self) -> int:
        """Tokens whose KV is not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def is_answering(self) -> bool:
        """Whether it needs one more token of its answer, and nothing before it."""
        return self.generated > 0 and self.pending_tokens == 1

    @property
    def is_awaiting_mask(self) -> bool:
        """Whether its next token could not be chosen, however long the step takes."""
        return self.grammar is not None and self.grammar.is_awaited(self.tokens)

    def ends_at(self, tokens: int, max_model_tokens: int) -> bool:
        """Whether it ends when it has `tokens` tokens, whatever they are."""
        return tokens >= max_model_tokens or tokens - self.prompt_tokens >= self.sampling.max_tokens

    def history(self, tokens: int) -> TokenHistory:
        """The first `tokens` tokens, for penalties; created once and extended with new tokens, never fewer."""
        if self._history is None:
            self._history_tokens = self.prompt_tokens - self.answered_tokens
            self._history = TokenHistory(self.tokens[: self._history_tokens])
        self._history.extend(self.tokens[self._history_tokens : tokens])
        self._history_tokens = tokens
        return self._history

    def hashes(self, blocks: int) -> list[BlockHash]:
        """Hashes of the first `blocks` full blocks; computed once and extended with new tokens."""
        have = len(self._hashes)
        if blocks > have:
            tail = self.tokens[have * self.block_tokens : blocks * self.block_tokens]
            parent = self._hashes[-1] if self._hashes else None
            self._hashes.extend(hash_blocks(tail, self.block_tokens, self.hash_key, parent=parent))
        return self._hashes[:blocks]
