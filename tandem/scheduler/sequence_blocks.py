"""The KV blocks of sequences: which are found, kept and released as tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.kvcache.block_pool import BlockHold, BlockPool, Found
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.sequence import Sequence


@dataclass(slots=True)
class SequenceBlocks:
    """`window_tokens`: the widest window, if every layer has one: earlier tokens are never read. `caches` False: no
    prompts share a prefix, so blocks are not made findable."""

    pool: BlockPool
    block_tokens: int
    window_tokens: int | None = None
    caches: bool = True

    def match(self, sequence: Sequence) -> list[Found]:
        """Cached blocks of a prefix of its tokens."""
        # At least one token is always computed, for its logits.
        matchable = (len(sequence.tokens) - 1) // self.block_tokens
        return self.pool.match(sequence.hashes(matchable)) if sequence.may_use_cache else []

    def settle(self, sequence: Sequence) -> None:
        """After tokens were computed: makes newly filled blocks findable, and releases those that no later token
        reads."""
        self.commit(sequence)
        self._release_passed(sequence)

    def commit(self, sequence: Sequence) -> None:
        """Makes newly filled blocks findable."""
        full = sequence.computed // self.block_tokens
        if self.caches and full > sequence.committed:
            hashes = sequence.hashes(full)
            for block, block_hash in zip(
                sequence.blocks[sequence.committed : full], hashes[sequence.committed :], strict=True
            ):
                self.pool.commit(block, block_hash)
            sequence.committed = full

    def forget(self, sequence: Sequence) -> None:
        """Makes all of its blocks no longer findable."""
        self.pool.forget(sequence.hashes(sequence.committed))

    def convert(self, sequence: Sequence, hold: BlockHold) -> None:
        self.pool.convert(sequence.held_blocks, sequence.hold, hold)
        sequence.hold = hold

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.held_blocks, sequence.hold)
        sequence.drop_blocks()

    def release_branches(self, sequence: Sequence) -> None:
        if sequence.branch_blocks:
            self.pool.release(sequence.branch_blocks, sequence.hold)
            sequence.branch_blocks = []

    def release_unused(self, sequence: Sequence) -> None:
        """Releases blocks for proposed tokens that its answer does not have."""
        needed = blocks_for(len(sequence.tokens), self.block_tokens)
        self.pool.release(sequence.blocks[needed:], sequence.hold)
        del sequence.blocks[needed:]

    def _release_passed(self, sequence: Sequence) -> None:
        """Releases blocks that no later token reads, except exported ones. They stay findable until evicted."""
        if self.window_tokens is None or sequence.is_exporting:
            return
        passed = max(0, sequence.computed + 1 - self.window_tokens) // self.block_tokens
        if passed > sequence.passed_blocks:
            self.pool.release(sequence.blocks[sequence.passed_blocks : passed], sequence.hold)
            sequence.passed_blocks = passed
