"""The engine's scheduler, which may also repeat a step: while every request only decodes and none comes or ends, one
step is like the next, and thousands of them need not be planned one by one."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import cast

from planner.simulator.sequence import SimSequence
from tandem.kvcache.block_pool import BlockPool, Hold
from tandem.kvcache.blockhash import BlockHash
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence


class SimBlockPool(BlockPool):
    def hashes(self) -> list[BlockHash]:
        """All that can be found: what a worker's snapshot tells."""
        return list(self._by_hash)


@dataclass(slots=True)
class RepeatingScheduler(Scheduler):
    """`caches` False: no two prompts share anything, so what is cached would never be found and is not noted."""

    caches: bool = True

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """Waiting, running, reserved or exported."""
        return self._sequences

    @property
    def decoding(self) -> SequenceOf[Sequence]:
        """Who runs; while steps repeat, all of these only decode."""
        return self._running

    def steady_steps(self, most: int) -> int:
        """How many steps from now on do nothing but add a token to each running request; the last of them may end
        some. 0 when the next step does anything else."""
        running = self._running
        if self._waiting or not running or len(running) > self.max_step_tokens:
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
        """Carries out so many steps at once, at most `steady_steps`. Returns who took part."""
        took_part = cast("list[SimSequence]", list(self._running))  # nothing else is ever added here
        self._steps += steps
        for each in took_part:
            each.computed += steps
            fresh = blocks_for(each.computed, self.block_tokens) - len(each.blocks)
            if fresh > 0:
                each.blocks += self.pool.acquire([], fresh, Hold.USE)
            if each.computed // self.block_tokens > each.committed:
                self._commit(each)
            each.last_step = self._steps
            each.counted.grow(steps)
        return took_part

    def _commit(self, sequence: Sequence) -> None:
        if self.caches:
            Scheduler._commit(self, sequence)

    def _growth(self, steps: int) -> int:
        size = self.block_tokens
        return sum(max(0, blocks_for(each.computed + steps, size) - len(each.blocks)) for each in self._running)
