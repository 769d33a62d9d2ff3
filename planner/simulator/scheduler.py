"""The engine's scheduler, extended to repeat a step. While every request decodes and none arrives or ends, all steps
are alike, so thousands of them need no separate plan."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import cast

from planner.simulator.sequence import SimSequence
from tandem.kvcache.block_pool import BlockHold, BlockPool
from tandem.kvcache.blockhash import BlockHash
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence


class SimBlockPool(BlockPool):
    def hashes(self) -> list[BlockHash]:
        """Hashes of all blocks that can be found: the contents of a worker's snapshot."""
        return list(self._by_hash)


@dataclass(slots=True)
class RepeatingScheduler(Scheduler):
    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """Waiting, running, reserved or exported."""
        return self._sequences

    @property
    def decoding(self) -> SequenceOf[Sequence]:
        """Running requests; while steps repeat, all of them decode."""
        return self._running

    def steady_steps(self, most: int) -> int:
        """The number of next steps, at most `most`, that only add a token to each running request. The last one may end
        requests. 0 if the next step does anything else."""
        running = self._running
        if self._waiting or not running or len(running) > self.max_step_tokens or self.speculator is not None:
            return 0
        steps = most
        for each in running:
            if len(each.tokens) - each.computed != 1 or each.export_from_block is not None:
                return 0
            steps = min(steps, each.sampling.max_tokens - each.generated, self.max_model_tokens - len(each.tokens))
        while steps > 1 and self._growth(steps) > self.pool.available():
            steps //= 2
        return steps if steps > 1 else 0

    def repeat(self, steps: int) -> list[SimSequence]:
        """Executes `steps` steps at once, at most `steady_steps`. Returns the requests that took part."""
        participants = cast("list[SimSequence]", list(self._running))  # only SimSequences are added
        self._steps += steps
        for each in participants:
            each.computed += steps
            fresh = blocks_for(each.computed, self.block_tokens) - len(each.blocks)
            if fresh > 0:
                each.blocks += self.pool.acquire([], fresh, BlockHold.USE)
            if each.computed // self.block_tokens > each.committed:
                self._blocks.commit(each)
            each.last_step = self._steps
            each.counted.grow(steps)
        return participants

    def _growth(self, steps: int) -> int:
        size = self.block_tokens
        return sum(max(0, blocks_for(each.computed + steps, size) - len(each.blocks)) for each in self._running)
