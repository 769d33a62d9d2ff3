"""Which blocks of an exported prompt each step of vLLM completes. Pure, and without vLLM.

vLLM plans a step as so many tokens of each request from so many computed ones on; our transfer agents take ranges of
blocks.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from tandem.kvcache.layout import KvPoolLayout, blocks_for
from tandem.scheduler.plan import ExportRange


@dataclass(slots=True)
class Export:
    """A prompt whose blocks are exported from logical block `next_block` on."""

    request_id: str
    prompt_tokens: int
    next_block: int

    def ranges(
        self, computed: int, count: int, blocks: list[int], layout: KvPoolLayout, written: Set[int]
    ) -> list[ExportRange]:
        """What a step may send that computes `count` tokens after `computed` ones.

        Args:
            blocks: the prompt's, as far as they are allocated.
            written: blocks that the step writes. vLLM finds a block from when its computation is planned, so what is
                found may be computed by another request in the same step.
        """
        ranges, block_tokens = [], layout.block_tokens
        reach = computed + count
        cached = computed // block_tokens
        if cached > self.next_block:
            in_cache = written.isdisjoint(blocks[self.next_block : cached])
            ranges.append(self._next_range(blocks, cached, block_tokens, in_cache=in_cache, is_last=False))
        is_last = reach >= self.prompt_tokens
        end = blocks_for(self.prompt_tokens, block_tokens) if is_last else reach // block_tokens
        if end > self.next_block:
            last = layout.last_tokens(self.prompt_tokens) if is_last else block_tokens
            ranges.append(self._next_range(blocks, end, last, in_cache=False, is_last=is_last))
        return ranges

    def _next_range(
        self, blocks: list[int], end: int, last_block_tokens: int, *, in_cache: bool, is_last: bool
    ) -> ExportRange:
        first, self.next_block = self.next_block, end
        return ExportRange(self.request_id, first, tuple(blocks[first:end]), last_block_tokens, in_cache, is_last)
