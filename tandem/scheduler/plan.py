"""What a step does: the chunks that are computed, and the blocks that leave for another worker with it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tandem.errors import TandemError
from tandem.kvcache.host_tier import BlockCopies
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ExportRange:
    """Logical blocks [first_block, first_block + len(block_ids)) of a prompt, in physical blocks `block_ids`, all full
    but the last, which holds `last_block_tokens`. `in_cache`: their KV was there before this step (all layers may go at
    once); otherwise each layer may go when it is done. `is_last`: the prompt ends here."""

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]
    last_block_tokens: int
    in_cache: bool
    is_last: bool


class Chunk(msgspec.Struct, frozen=True):  # as in engine/api.py: made for each token
    """`count` tokens of `sequence` from position `start` on. It samples when that reaches the last token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @classmethod
    def next_of(cls, sequence: Sequence, count: int) -> Chunk:
        start = sequence.computed
        return cls(sequence, start, count, samples=start + count == len(sequence.tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`copies` come before all else. `failed`: requests that left because they can never have the blocks they need.
    `began`: those whose prompt is computed for the first time."""

    chunks: tuple[Chunk, ...]
    exports: tuple[ExportRange, ...]
    failed: tuple[tuple[str, TandemError], ...] = ()
    began: tuple[str, ...] = ()
    copies: BlockCopies | None = None


def shared_tokens(sequence: Sequence, chunk: Chunk, block_tokens: int) -> int:
    """Tokens of `sequence` in blocks that this chunk completes: once it is computed they are cached."""
    other = chunk.sequence
    # At least one token is always computed: its logits choose the next.
    end = min(chunk.start + chunk.count, len(sequence.tokens) - 1) // block_tokens
    if end <= other.committed or not sequence.may_use_cache:
        return 0
    pairs = zip(sequence.hashes(end)[other.committed :], other.hashes(end)[other.committed :], strict=True)
    return block_tokens * sum(mine == theirs for mine, theirs in pairs)  # hashes are chained: the equal ones lead


def cached_range(sequence: Sequence, block_tokens: int) -> ExportRange | None:
    """What the cache already holds of the wanted blocks goes at once."""
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
        is_last=False,  # at least the last token is computed, so a range of its block follows
    )


def computed_range(chunk: Chunk, block_tokens: int) -> ExportRange | None:
    """The blocks that this chunk completes, and the partial one in which the prompt ends."""
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
