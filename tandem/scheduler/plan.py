"""The plan of a step: the chunks to compute, and the blocks to export with it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tandem.errors import TandemError
from tandem.kvcache.host_tier import BlockCopies
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.sequence import Sequence
from tandem.speculation.proposers import Branch, Draft


@dataclass(frozen=True, slots=True)
class ExportRange:
    """Logical blocks [first_block, first_block + len(block_ids)) of a prompt, in physical blocks `block_ids`.

    All are full but the last, which holds `last_block_tokens`. `in_cache`: their KV was cached before this step, so all
    layers may be sent at once; otherwise each layer may be sent when it is done. `is_last`: the prompt ends here.
    """

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]
    last_block_tokens: int
    in_cache: bool
    is_last: bool


class Chunk(msgspec.Struct, frozen=True):  # as in engine/api.py: created per token
    """`count` tokens of `sequence` from position `start` on. It samples if it includes the last token, and then after
    each of the `proposed` tokens, which follow that one. With a `draft` these are known once the ranks have drafted
    them, and `beside`, for its branches, as in `Branch.tokens`."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    proposed: tuple[int, ...] = ()
    draft: Draft | None = None
    beside: tuple[tuple[int, ...], ...] = ()

    @property
    def proposes(self) -> int:
        """How many tokens follow the last one, without branches."""
        return len(self.proposed) if self.draft is None else self.draft.count

    @property
    def branches(self) -> tuple[Branch, ...]:
        return () if self.draft is None else self.draft.branches

    @property
    def proposed_tokens(self) -> int:
        """With those of branches that are their own."""
        return self.proposes + sum(each.count - each.shared for each in self.branches)

    @property
    def chain_samples(self) -> int:
        """Without branches."""
        return 1 + self.proposes if self.samples else 0

    @property
    def sampled_tokens(self) -> int:
        """Those of branches follow the others: one after the request's last token, and one after each of theirs."""
        return self.chain_samples + sum(1 + each.count for each in self.branches)

    @property
    def computed_tokens(self) -> int:
        return self.count + self.proposes + sum(1 + each.count for each in self.branches)

    def with_proposal(
        self,
        proposed: tuple[int, ...] = (),
        draft: Draft | None = None,
        beside: tuple[tuple[int, ...], ...] = (),
    ) -> Chunk:
        return Chunk(self.sequence, self.start, self.count, self.samples, proposed, draft, beside)

    @classmethod
    def next_of(cls, sequence: Sequence, count: int) -> Chunk:
        start = sequence.computed
        return cls(sequence, start, count, samples=start + count == len(sequence.tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`copies` are made first. `failed`: requests removed because they can never get the blocks they need, or cannot
    be computed. `began`: requests whose first prompt chunk is computed. `beside_answers`: tokens of prompts that were
    limited because answers go on."""

    chunks: tuple[Chunk, ...]
    exports: tuple[ExportRange, ...]
    failed: tuple[tuple[str, TandemError], ...] = ()
    began: tuple[str, ...] = ()
    copies: BlockCopies | None = None
    beside_answers: int = 0


def shared_tokens(sequence: Sequence, chunk: Chunk, block_tokens: int) -> int:
    """Tokens of `sequence` in blocks that this chunk completes, which are cached once it is computed."""
    other = chunk.sequence
    # At least one token is always computed, for its logits.
    end = min(chunk.start + chunk.count, len(sequence.tokens) - 1) // block_tokens
    if end <= other.committed or not sequence.may_use_cache:
        return 0
    pairs = zip(sequence.hashes(end)[other.committed :], other.hashes(end)[other.committed :], strict=True)
    return block_tokens * sum(mine == theirs for mine, theirs in pairs)  # chained hashes: equal ones are a prefix


def cached_range(sequence: Sequence, block_tokens: int) -> ExportRange | None:
    """The requested blocks that are already cached, which may be sent at once."""
    if sequence.export_from_block is None:
        return None
    first = max(sequence.export_from_block, sequence.exported_blocks)
    cached_blocks = sequence.committed
    sequence.exported_blocks = max(first, cached_blocks)
    if cached_blocks <= first:
        return None
    return ExportRange(
        request_id=sequence.request_id,
        first_block=first,
        block_ids=tuple(sequence.blocks[first:cached_blocks]),
        last_block_tokens=block_tokens,
        in_cache=True,
        is_last=False,  # a range of the last block follows, as its last token is always computed
    )


def computed_range(chunk: Chunk, block_tokens: int) -> ExportRange | None:
    """The blocks that this chunk completes, and the partial block at the end of the prompt."""
    sequence = chunk.sequence
    if sequence.export_from_block is None:
        return None
    reach = chunk.start + chunk.count
    is_last = reach == sequence.prompt_tokens
    end = blocks_for(reach, block_tokens) if is_last else reach // block_tokens
    first = sequence.exported_blocks
    if end <= first:
        return None
    sequence.exported_blocks = end
    partial = reach % block_tokens if is_last else 0
    return ExportRange(
        request_id=sequence.request_id,
        first_block=first,
        block_ids=tuple(sequence.blocks[first:end]),
        last_block_tokens=partial or block_tokens,
        in_cache=False,
        is_last=is_last,
    )
