"""A scheduler over a pretended KV memory: it holds token ids where a real one holds keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from typing import Any

import pytest

from tandem.engine.api import TokenOut
from tandem.engine.loop.chooser import TokenChooser
from tandem.engine.output import StepOutput
from tandem.errors import KvExhausted, TandemError
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.blockhash import HashKey
from tandem.kvcache.host_tier import BlockCopies, HostTier
from tandem.request import SamplingParams
from tandem.scheduler.batching import BatchRule
from tandem.scheduler.plan import Chunk, ExportRange, StepPlan
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence
from tandem.speculation.proposers import Branch, Candidate, Draft, Proposal, Speculation
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


class Branching(HalfRight):
    """Drafts that many instead, with two branches: one is right where the chain's middle token is wrong."""

    def propose(self, candidates: Iterable[Candidate], step: Step) -> list[Proposal]:
        proposals, room = list[Proposal](), step.room
        for each in candidates:
            count = min(each.most, len(each.tokens) % 6, room // 5)
            branches = (Branch(count // 2, 1, count), Branch(0, 2, 1)) if count else ()
            draft = Draft(count, beside=2, branches=branches) if count else None
            proposals.append(Proposal(draft=draft))
            room -= 3 + 2 * count if count else 0
        return proposals

    def drafted(self, tokens: list[int], count: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        chain, right = self._proposed(tokens, count), list(tokens)
        for _ in range(count):
            right.append(next_token(right))
        return chain, tuple((token, 99) for token in right[len(tokens) :])


@dataclass
class World:
    """Carries out plans, and checks at every step that a request reads back exactly its own tokens."""

    blocks: int = 16
    budget: int = 16
    max_running: int = 4
    slots: int = 0
    proposes: bool = False  # right tokens and wrong ones
    branches: bool = False  # beside them
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
    from_branches: int = 0  # tokens
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
            speculator=(Branching() if self.branches else HalfRight()) if self.proposes else None,
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
        plan = self._drafted(self.scheduler.schedule())
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
            self._write_proposed(chunk)
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

    def _drafted(self, plan: StepPlan) -> StepPlan:
        """With what the ranks would draft."""

        def drafted(chunk: Chunk) -> Chunk:
            if chunk.draft is None:
                return chunk
            assert isinstance(self.scheduler.speculator, Branching)
            chain, beside = self.scheduler.speculator.drafted(chunk.sequence.tokens, chunk.draft.count)
            return chunk.with_proposal(chain, chunk.draft, beside)

        return replace(plan, chunks=tuple(map(drafted, plan.chunks)))

    def _write_proposed(self, chunk: Chunk) -> None:
        blocks, end = chunk.sequence.blocks, chunk.start + chunk.count
        for position, token in enumerate(chunk.proposed, end):
            self.memory[blocks[position // BLOCK], position % BLOCK] = token
        first, written = divmod(end - 1, BLOCK)
        for branch in chunk.branches:
            assert len({*blocks, *branch.blocks}) == len(blocks) + len(branch.blocks)
            own = [*blocks[:first], *branch.blocks]
            for offset in range(written):
                self.memory[own[first], offset] = self.memory[blocks[first], offset]
            text = [chunk.sequence.tokens[-1], *branch.tokens(chunk.proposed, chunk.beside)]
            for position, token in enumerate(text, end - 1):
                self.memory[own[position // BLOCK], position % BLOCK] = token

    def _check(self, plan: StepPlan) -> None:
        assert sum(chunk.computed_tokens for chunk in plan.chunks) <= self.budget
        assert len({chunk.sequence.request_id for chunk in plan.chunks}) == len(plan.chunks)
        partly = [chunk for chunk in plan.chunks if not chunk.samples]
        assert len(partly) <= 1
        for chunk in plan.chunks:
            assert chunk.count > 0
            assert chunk.start == chunk.sequence.computed
            assert len(chunk.sequence.blocks) * BLOCK >= chunk.start + chunk.count + chunk.proposes
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
        sequence, text = chunk.sequence, list(chunk.sequence.tokens)
        paths = [chunk.proposed, *(each.tokens(chunk.proposed, chunk.beside) for each in chunk.branches)]
        chosen = [next_token([*text, *path[:count]]) for path in paths for count in range(len(path) + 1)]
        output, told = StepOutput([*chosen], [None] * len(chosen), []), list[TokenOut]()
        ended: list[Sequence] = []
        right = TokenChooser(self.scheduler, ended.append).choose(chunk, output, 0, None, told, [])
        self.answers.setdefault(sequence.request_id, []).extend(each.token_id for each in told)
        of_chain = len([*takewhile(bool, map(eq, chunk.proposed, sequence.tokens[len(text) :]))])
        self.from_branches += right - of_chain
        if chunk.proposed:
            assert len(sequence.blocks) <= -(-len(sequence.tokens) // BLOCK), "none is kept for refused tokens"
            assert not sequence.branch_blocks
            self.check_content(sequence, sequence.computed)
        assert sequence.pending_tokens == 1
        assert bool(ended) == (sequence.is_exporting or sequence.generated >= sequence.sampling.max_tokens)
        if ended:
            self.scheduler.finish(sequence)


@pytest.fixture
def make_world() -> type[World]:
    return World
