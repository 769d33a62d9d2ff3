"""One request inside the engine, and the one enum that says where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.kvcache.block_pool import Hold
from tandem.kvcache.blockhash import BlockHash, HashKey, hash_blocks
from tandem.request import SamplingParams
from tandem.token_history import TokenHistory


class Stage(StrEnum):
    """WAITING → RUNNING → (gone), or → EXPORTED → (gone); RESERVED → RUNNING; RUNNING ↔ HELD → (gone). Preemption leads
    back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"  # blocks leased; somebody else fills them
    EXPORTED = "exported"  # done here; blocks leased until their reader is done
    HELD = "held"  # decodes no further; it is moved elsewhere or goes on later


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one request.

    `tokens` is the prompt and what was generated; the KV of the first `computed` of them is in the pool. `committed`
    counts the leading blocks that are findable by hash, `exported_blocks` those that the other side has or was told of.
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    hash_key: HashKey
    block_tokens: int
    arrival: int
    use_prefix_cache: bool = True
    export_from_block: int | None = None
    answered_tokens: int = 0  # at the end of the prompt: generated before this engine got the request
    stage: Stage = Stage.WAITING
    hold: Hold = Hold.USE
    blocks: list[int] = field(default_factory=list)
    passed_blocks: int = 0  # leading ones that lie behind every layer's window: given back, their numbers mean nothing
    computed: int = 0
    committed: int = 0
    exported_blocks: int = 0
    scored_tokens: int = 1  # leading prompt tokens that need no logprob any more; the first never has one
    last_step: int = 0  # when it last ran
    expected_cached_tokens: int = 0  # in the cache when it began to wait
    cached_tokens: int | None = None  # found in the cache when it was first scheduled
    _hashes: list[BlockHash] = field(default_factory=list)
    _history: TokenHistory | None = None
    _history_tokens: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def may_use_cache(self) -> bool:
        """For computing it: a prompt whose logprobs are still wanted is computed from its beginning."""
        scores_wanted = self.sampling.prompt_logprobs is not None and self.scored_tokens < self.prompt_tokens
        return self.use_prefix_cache and not scores_wanted

    @property
    def held_blocks(self) -> list[int]:
        """Those that are still its own."""
        return self.blocks[self.passed_blocks :]

    @property
    def is_exporting(self) -> bool:
        return self.export_from_block is not None

    @property
    def is_pinned(self) -> bool:
        """Somebody may be reading its blocks: they stay where they are until the export is released."""
        return self.export_from_block is not None and self.exported_blocks > self.export_from_block

    @property
    def pending_tokens(self) -> int:
        """Tokens whose KV is not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    def history(self) -> TokenHistory:
        """What penalties look at; made once and extended as tokens come."""
        if self._history is None:
            self._history_tokens = self.prompt_tokens - self.answered_tokens
            self._history = TokenHistory(self.tokens[: self._history_tokens])
        self._history.extend(self.tokens[self._history_tokens :])
        self._history_tokens = len(self.tokens)
        return self._history

    def hashes(self, blocks: int) -> list[BlockHash]:
        """Hashes of the first `blocks` full blocks; made once and extended as tokens come."""
        have = len(self._hashes)
        if blocks > have:
            tail = self.tokens[have * self.block_tokens : blocks * self.block_tokens]
            parent = self._hashes[-1] if self._hashes else None
            self._hashes.extend(hash_blocks(tail, self.block_tokens, self.hash_key, parent=parent))
        return self._hashes[:blocks]
