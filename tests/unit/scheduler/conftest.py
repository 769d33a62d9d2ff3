"""A scheduler over a pretended KV memory: it holds token ids where a real one holds keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.errors import KvExhausted, TandemError
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.blockhash import HashKey
from tandem.kvcache.host_tier import BlockCopies, HostTier
from tandem.request import SamplingParams
from tandem.scheduler.batching import BatchRule
from tandem.scheduler.plan import Chunk, ExportRange, StepPlan
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence
from tandem.speculation.proposers import Candidate, Proposal, Speculation
from tandem.speculation.speculator import Speculator, Step
from tandem.speculation.text_proposers import Lookup

BLOCK = 4
STEP_S = 0.01


def next_token(tokens: list[int]) -> int:
    """What the pretended model chooses."""
    return (sum(tokens) * 31 + len(tokens)) % 97


class HalfRight(Speculator):
    """Proposes up to five tokens, and makes one wrong where the sum of the tokens is odd."""

    def __init__(self) -> None:
        super().__init__(5, Lookup())

    def propose(self, candidates: Iterable[Candidate], step: Step) -> list[Proposal]:
        proposals, room = list[Proposal](), step.room
        for each in candidates:
            proposals.append(Proposal(self._proposed(each.tokens, min(each.most, len(each.tokens) % 6))[:room]))
            room -= len(proposals[-1].tokens)
        return proposals

    def _proposed(self, tokens: list[int], most: int) -> tuple[int, ...]:
        text = list(tokens)
        for _ in range(most):
            text.append(next_token(text))
        proposed = text[len(tokens) :]
        if proposed and sum(tokens) % 2:
            proposed[len(proposed) // 2] = 98
        return tuple(proposed)


@dataclass
class World:
    """Carries out plans, and checks at every step that a request reads back exactly its own tokens."""

    blocks: int = 16
    budget: int = 16
    max_running: int = 4
    slots: int = 0
    proposes: bool = False  # right tokens and wrong ones
    batches: BatchRule | None = None
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    ranges: dict[str, list[ExportRange]] = field(default_factory=dict)
    read_by_others: dict[str, Sequence] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, TandemError] = field(default_factory=dict)
    host_memory: dict[tuple[int, int], int] = field(default_factory=dict)
    computed_tokens: int = 0
    arrivals: int = 0
    now_s: float = 0.0
    batch: set[str] = field(default_factory=set)  # of the last one, and those that joined it

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, HostTier(self.slots) if self.slots else None)
        self.scheduler = Scheduler(
            self.pool,
            block_tokens=BLOCK,
            max_running_requests=self.max_running,
            max_step_tokens=self.budget,
            max_model_tokens=1000,
            speculator=HalfRight() if self.proposes else None,
            batches=self.batches,
        )

    def sequence(self, name: str, prompt: list[int], max_tokens: int = 3, **options: Any) -> Sequence:
        self.arrivals += 1
        return Sequence(
            request_id=name,
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            hash_key=HashKey("model"),
            block_tokens=BLOCK,
            arrival=self.arrivals,
            arrived_s=self.now_s,
            speculation=Speculation() if self.proposes else None,
            **options,
        )

    def add(self, name: str, prompt: list[int], max_tokens: int = 3, **options: Any) -> Sequence:
        sequence = self.sequence(name, prompt, max_tokens, **options)
        self.scheduler.add(sequence)
        return sequence

    def reserve(self, name: str, prompt: list[int], max_tokens: int = 3) -> Sequence:
        sequence = self.sequence(name, prompt, max_tokens)
        self.scheduler.reserve(sequence)
        self._copy(self.pool.take_copies())
        return sequence

    def fill(self, sequence: Sequence, first_token: int = 1) -> None:
        """The import: blocks that were not cached get their content; then the request joins."""
        self.check_content(sequence, sequence.committed * BLOCK)
        for position in range(sequence.committed * BLOCK, sequence.prompt_tokens):
            self._write(sequence, position)
        self.scheduler.join(sequence.request_id, first_token)
        self.batch.add(sequence.request_id)

    def collect(self) -> float | None:
        """When the next batch will begin. Checks one that begins now."""
        before, had_work = list(self.scheduler._collected), self.scheduler.has_work or self.scheduler._stalled
        due_s = self.scheduler.collect(self.now_s)
        begun = [each for each in before if each not in self.scheduler._collected]
        if begun:
            assert due_s is None
            assert not had_work, "a batch begins when the one before has ended"
            assert len(begun) <= self.max_running
            assert begun == before[: len(begun)]
            self.batch = {each.request_id for each in begun}
        return due_s

    def wait(self) -> None:
        """Until the next batch begins, if one is collected."""
        if (due_s := self.collect()) is not None:
            self.now_s = due_s
            assert self.collect() is None

    def step(self) -> StepPlan:
        self.now_s += STEP_S
        self.collect()
        plan = self.scheduler.schedule()
        if self.batches is not None:
            assert {chunk.sequence.request_id for chunk in plan.chunks} <= self.batch, "no other request joins"
        self._check(plan)
        self._copy(plan.copies)
        for exported in plan.exports:
            self.ranges.setdefault(exported.request_id, []).append(exported)
        for chunk in plan.chunks:
            if chunk.sequence.request_id in self.ranges:
                self.read_by_others[chunk.sequence.request_id] = chunk.sequence
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                self._write(chunk.sequence, position)
            self.check_content(chunk.sequence, chunk.start + chunk.count)
            self.computed_tokens += chunk.count
            for position, token in enumerate(chunk.proposed, chunk.start + chunk.count):
                self.memory[chunk.sequence.blocks[position // BLOCK], position % BLOCK] = token
        self.scheduler.advance(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                self._sample(chunk)
        self.failed |= dict(plan.failed)
        for name in self.failed:
            self.read_by_others.pop(name, None)
        self.check_exported()
        return plan

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            self.wait()
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler did not come to rest")

    def at_rest(self) -> bool:
        counts = self.pool.counts()
        return counts.conserved and self.pool.tier_counts().conserved and counts.in_use == counts.leased == 0

    def _check(self, plan: StepPlan) -> None:
        assert sum(chunk.computed_tokens for chunk in plan.chunks) <= self.budget
        assert len({chunk.sequence.request_id for chunk in plan.chunks}) == len(plan.chunks)
        partly = [chunk for chunk in plan.chunks if not chunk.samples]
        assert len(partly) <= 1
        for chunk in plan.chunks:
            assert chunk.count > 0
            assert chunk.start == chunk.sequence.computed
            assert len(chunk.sequence.blocks) * BLOCK >= chunk.start + chunk.computed_tokens
            assert not chunk.proposed or chunk.sequence.generated
        assert all(isinstance(error, KvExhausted) for _, error in plan.failed)

    def _copy(self, copies: BlockCopies | None) -> None:
        if copies is None:
            return
        for block, slot in zip(copies.out_blocks, copies.out_slots, strict=True):
            self.host_memory |= {(slot, offset): self.memory[block, offset] for offset in range(BLOCK)}
        for slot, block in zip(copies.in_slots, copies.in_blocks, strict=True):
            self.memory |= {(block, offset): self.host_memory[slot, offset] for offset in range(BLOCK)}

    def _write(self, sequence: Sequence, position: int) -> None:
        self.memory[sequence.blocks[position // BLOCK], position % BLOCK] = sequence.tokens[position]

    def check_content(self, sequence: Sequence, tokens: int) -> None:
        for position in range(tokens):
            block = sequence.blocks[position // BLOCK]
            assert self.memory[block, position % BLOCK] == sequence.tokens[position]

    def release(self, name: str) -> None:
        self.read_by_others.pop(name, None)
        self.scheduler.release_export(name)

    def cancel(self, name: str) -> bool:
        self.read_by_others.pop(name, None)
        return self.scheduler.cancel(name)

    def check_exported(self) -> None:
        """What was exported stays what it is until it is released."""
        for name, sequence in self.read_by_others.items():
            for exported in self.ranges[name]:
                tokens = len(exported.block_ids) * BLOCK - BLOCK + exported.last_block_tokens
                for offset in range(tokens):
                    cell = exported.block_ids[offset // BLOCK], offset % BLOCK
                    assert self.memory[cell] == sequence.tokens[exported.first_block * BLOCK + offset]

    def _sample(self, chunk: Chunk) -> None:
        sequence, accepted = chunk.sequence, 0
        for proposed in (*chunk.proposed, None):
            token = next_token(sequence.tokens)
            sequence.tokens.append(token)
            self.answers.setdefault(sequence.request_id, []).append(token)
            if sequence.generated >= sequence.sampling.max_tokens or token != proposed:
                break
            accepted += 1
        if chunk.proposed:
            self.scheduler.accept(chunk, min(len(chunk.proposed), accepted + 1), accepted)
            assert len(sequence.blocks) <= -(-len(sequence.tokens) // BLOCK), "none is kept for refused tokens"
            self.check_content(sequence, sequence.computed)
        assert sequence.pending_tokens == 1
        if sequence.is_exporting or sequence.generated >= sequence.sampling.max_tokens:
            self.scheduler.finish(sequence)


@pytest.fixture
def make_world() -> type[World]:
    return World
