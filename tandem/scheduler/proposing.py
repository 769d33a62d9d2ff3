"""What is proposed in a step: tokens that pay, with what is left of the step's budget and of the pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tandem.kvcache.block_pool import BlockHold, BlockPool
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.plan import Chunk
from tandem.scheduler.sequence import Sequence
from tandem.speculation.proposers import Branch, Candidate, Draft, Proposal
from tandem.speculation.speculator import Speculator, Step

log = logging.getLogger(__name__)


def with_proposals(chunks: list[Chunk], speculator: Speculator, room: ProposalRoom) -> list[Chunk]:
    """The chunks of a step with proposed tokens. Without, if proposing fails."""
    able = [chunk for chunk in chunks if chunk.samples and chunk.sequence.takes_proposals]
    tokens = sum(chunk.count for chunk in chunks)
    step = Step(tokens, sum(chunk.samples for chunk in chunks), room.max_step_tokens - tokens)
    if not able:
        speculator.found_nothing()
    if not able or step.room < 1:
        return chunks
    try:
        proposals = speculator.propose([room.candidate(chunk) for chunk in able], step)
    except Exception:
        log.exception("a step has no proposals")
        return chunks
    found = {chunk.sequence: proposal for chunk, proposal in zip(able, proposals, strict=True)}
    return [room.with_proposal(each, found[each.sequence]) if each.sequence in found else each for each in chunks]


@dataclass(frozen=True, slots=True)
class ProposalRoom:
    """A block for each of the `running` requests stays."""

    pool: BlockPool
    block_tokens: int
    max_step_tokens: int
    max_model_tokens: int
    running: int

    def candidate(self, chunk: Chunk) -> Candidate:
        sequence = chunk.sequence
        assert sequence.speculation is not None
        last = min(sequence.prompt_tokens + sequence.sampling.max_tokens, self.max_model_tokens) - 1
        return Candidate(
            sequence.speculation,
            sequence.tokens,
            last - len(sequence.tokens),
            chunk.count,
            may_branch=sequence.grammar is None,  # which is prepared for one chain
        )

    def with_proposal(self, chunk: Chunk, proposal: Proposal) -> Chunk:
        """Allocates blocks for proposed tokens, and proposes those that fit."""
        if (draft := proposal.draft) is not None:
            count = self._fitting(chunk.sequence, draft.count)
            branches = tuple(self._branches(chunk.sequence, draft, count))
            return chunk.with_proposal(draft=msgspec.structs.replace(draft, count=count, branches=branches))
        proposed = proposal.tokens
        return chunk.with_proposal(proposed[: self._fitting(chunk.sequence, len(proposed))]) if proposed else chunk

    def _fitting(self, sequence: Sequence, count: int) -> int:
        fresh = blocks_for(len(sequence.tokens) + count, self.block_tokens) - len(sequence.blocks)
        fresh = min(fresh, self.pool.available() - self.running)
        if fresh > 0:
            sequence.blocks += self.pool.acquire([], fresh, BlockHold.USE)
        return min(count, len(sequence.blocks) * self.block_tokens - len(sequence.tokens))

    def _branches(self, sequence: Sequence, draft: Draft, most: int) -> Iterator[Branch]:
        """Those that fit, cut to `most` tokens."""
        length = len(sequence.tokens)
        for each in draft.branches:
            count = min(each.count, most)
            needed = blocks_for(length + count, self.block_tokens) - (length - 1) // self.block_tokens
            if each.shared < count and needed <= self.pool.available() - self.running:
                blocks = self.pool.acquire([], needed, BlockHold.USE)
                sequence.branch_blocks += blocks
                yield Branch(each.shared, each.rank, count, tuple(blocks))
