"""What runs in the next step. A pure class: state in, plan out; no clock, no tensors.

Continuous batching with chunked prefill under a token budget (Sarathi-Serve, OSDI'24): requests that decode go
first, one token each; what is left of the budget goes to prompts, first come first served. When a decode needs a block
and none can be had, the youngest running request is preempted: its blocks go, and it is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tandem.errors import ContextExceeded, InputError, InternalError, KvExhausted, TandemError
from tandem.kvcache.block_pool import BlockPool, Hold
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.sequence import Sequence, Stage


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of `sequence` from position `start` on. It samples when that reaches the last token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]
    exports: tuple[ExportRange, ...]


@dataclass(slots=True)
class Scheduler:
    """Owns the sequences and their blocks."""

    pool: BlockPool
    block_tokens: int
    max_running_requests: int
    max_step_tokens: int
    max_model_tokens: int
    failed: list[tuple[str, TandemError]] = field(default_factory=list)
    _sequences: dict[str, Sequence] = field(default_factory=dict)
    _waiting: deque[Sequence] = field(default_factory=deque)
    _running: list[Sequence] = field(default_factory=list)  # in order of arrival

    # --- requests come and go ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._check(sequence)
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def reserve(self, sequence: Sequence) -> int:
        """Leases blocks for the whole prompt; returns how many leading ones are cached here.

        Raises:
            KvExhausted: there is no room now; nothing is changed.
        """
        self._check(sequence)
        full = sequence.prompt_tokens // self.block_tokens
        cached = self.pool.match(sequence.hashes(full)) if sequence.use_prefix_cache else []
        needed = blocks_for(sequence.prompt_tokens, self.block_tokens)
        fresh = self.pool.acquire(cached, needed - len(cached), Hold.LEASE)
        sequence.blocks = cached + fresh
        sequence.committed = len(cached)
        sequence.cached_tokens = len(cached) * self.block_tokens
        sequence.hold, sequence.stage = Hold.LEASE, Stage.RESERVED
        self._sequences[sequence.request_id] = sequence
        return len(cached)

    def join(self, request_id: str, first_token: int) -> None:
        """The reserved blocks are filled: their request decodes from the next step on."""
        sequence = self._get(request_id, Stage.RESERVED)
        self._rehold(sequence, Hold.USE)
        sequence.computed = sequence.prompt_tokens
        sequence.tokens.append(first_token)
        self._commit(sequence)
        sequence.stage = Stage.RUNNING
        self._running.append(sequence)

    def release_export(self, request_id: str) -> None:
        self._drop(self._get(request_id, Stage.EXPORTED))

    def cancel(self, request_id: str) -> bool:
        """True when there was such a request; its blocks are released, whatever its stage."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._drop(sequence)
        return True

    def finish(self, sequence: Sequence) -> None:
        """Its last token is sampled. An exporting request keeps its blocks, leased."""
        if sequence.is_exporting:
            self._running.remove(sequence)
            self._rehold(sequence, Hold.LEASE)
            sequence.stage = Stage.EXPORTED
        else:
            self._drop(sequence)

    def _check(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise InputError("request_id: expected a new one", field="request_id")
        prompt = sequence.prompt_tokens
        if prompt >= self.max_model_tokens:
            raise ContextExceeded(
                f"prompt: expected fewer than {self.max_model_tokens} tokens (the context), got {prompt}",
                field="prompt",
            )
        total = self.pool.counts().total
        if blocks_for(prompt + 1, self.block_tokens) > total:
            raise KvExhausted(
                f"a prompt of {prompt} tokens needs more than this worker's {total} KV blocks: "
                "raise engine.kv_memory_bytes"
            )

    def _get(self, request_id: str, stage: Stage) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.stage is not stage:
            raise InternalError(f"request {request_id} is not {stage}")
        return sequence

    def _drop(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is Stage.RUNNING:
            self._running.remove(sequence)
        self.pool.release(sequence.blocks, sequence.hold)
        sequence.blocks = []
        del self._sequences[sequence.request_id]

    def _rehold(self, sequence: Sequence, hold: Hold) -> None:
        self.pool.convert(sequence.blocks, sequence.hold, hold)
        sequence.hold = hold

    # --- a step ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        unstarted = sum(sequence.pending_tokens for sequence in self._waiting)
        return unstarted + sum(max(0, sequence.pending_tokens - 1) for sequence in self._running)

    def schedule(self) -> StepPlan:
        chunks: list[Chunk] = []
        exports: list[ExportRange] = []
        budget = self.max_step_tokens
        for sequence in list(self._running):
            if budget == 0:
                break
            if sequence.stage is not Stage.RUNNING:
                continue  # preempted for an older one, in this very step
            count = min(sequence.pending_tokens, budget)
            if self._grow(sequence, sequence.computed + count):
                chunks.append(Chunk(sequence, sequence.computed, count))
                budget -= count
        kept = [chunk for chunk in chunks if chunk.sequence.stage is Stage.RUNNING]
        preempted = len(kept) < len(chunks)
        chunks = kept
        # Whoever was preempted must not take the room back in the same step.
        while self._waiting and budget and not preempted and len(self._running) < self.max_running_requests:
            sequence = self._waiting[0]
            export = self._admit(sequence, budget)
            if sequence.stage is not Stage.RUNNING:
                break
            if export is not None:
                exports.append(export)
            count = min(sequence.pending_tokens, budget)
            chunks.append(Chunk(sequence, sequence.computed, count))
            budget -= count
        for chunk in chunks:
            if (export := self._export(chunk)) is not None:
                exports.append(export)
        return StepPlan(tuple(chunks), tuple(exports))

    def advance(self, plan: StepPlan) -> None:
        """The plan was carried out: its tokens' KV is in the pool."""
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.start + chunk.count
            self._commit(chunk.sequence)

    def _admit(self, sequence: Sequence, budget: int) -> ExportRange | None:
        """Moves the first waiting request to running when its first chunk has room."""
        # At least one token is always computed: its logits choose the next.
        matchable = (len(sequence.tokens) - 1) // self.block_tokens
        cached = self.pool.match(sequence.hashes(matchable)) if sequence.use_prefix_cache else []
        computed = len(cached) * self.block_tokens
        reach = min(len(sequence.tokens), computed + budget)
        fresh = blocks_for(reach, self.block_tokens) - len(cached)
        try:
            sequence.blocks = cached + self.pool.acquire(cached, fresh, Hold.USE)
        except KvExhausted as error:
            if not self._running and self._nothing_will_come_back():
                self._fail(sequence, error)
            return None
        self._waiting.popleft()
        self._running.append(sequence)
        sequence.stage, sequence.hold = Stage.RUNNING, Hold.USE
        sequence.computed, sequence.committed = computed, len(cached)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = computed
        return self._export_cached(sequence, len(cached))

    def _nothing_will_come_back(self) -> bool:
        return self.pool.counts().leased == 0

    def _grow(self, sequence: Sequence, reach: int) -> bool:
        """Gives `sequence` blocks up to `reach` tokens, at the cost of younger ones if need be."""
        fresh = blocks_for(reach, self.block_tokens) - len(sequence.blocks)
        while fresh > 0:
            try:
                sequence.blocks += self.pool.acquire([], fresh, Hold.USE)
                return True
            except KvExhausted as error:
                victim = self._running[-1]
                if victim is not sequence:
                    self._preempt(victim)
                elif len(self._running) > 1 or not self._nothing_will_come_back():
                    self._preempt(sequence)
                    return False
                else:
                    self._fail(sequence, error)
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the line. What it has exported stays exported."""
        self._running.remove(sequence)
        self.pool.release(sequence.blocks, sequence.hold)
        sequence.blocks, sequence.computed, sequence.committed = [], 0, 0
        sequence.stage = Stage.WAITING
        self._waiting.appendleft(sequence)

    def _fail(self, sequence: Sequence, error: TandemError) -> None:
        self._drop(sequence)
        self.failed.append((sequence.request_id, error))

    def _commit(self, sequence: Sequence) -> None:
        """Makes newly filled blocks findable."""
        full = sequence.computed // self.block_tokens
        if full > sequence.committed:
            hashes = sequence.hashes(full)
            for index in range(sequence.committed, full):
                self.pool.commit(sequence.blocks[index], hashes[index])
            sequence.committed = full

    # --- exports -----------------------------------------------------------------------------------------------

    def _export_cached(self, sequence: Sequence, cached_blocks: int) -> ExportRange | None:
        """What the cache already holds of the wanted blocks goes at once."""
        if sequence.export_from_block is None:
            return None
        first = max(sequence.export_from_block, sequence.exported_blocks)
        if cached_blocks <= first:
            sequence.exported_blocks = first
            return None
        sequence.exported_blocks = cached_blocks
        return ExportRange(
            request_id=sequence.request_id,
            first_block=first,
            block_ids=tuple(sequence.blocks[first:cached_blocks]),
            last_block_tokens=self.block_tokens,
            in_cache=True,
            is_last=False,  # at least the last token is computed, so a range of its block follows
        )

    def _export(self, chunk: Chunk) -> ExportRange | None:
        """The blocks that this chunk completes, and the partial one in which the prompt ends."""
        sequence = chunk.sequence
        if sequence.export_from_block is None:
            return None
        reach = chunk.start + chunk.count
        is_last = reach == sequence.prompt_tokens
        end = blocks_for(reach, self.block_tokens) if is_last else reach // self.block_tokens
        first = sequence.exported_blocks
        if end <= first:
            return None
        sequence.exported_blocks = end
        partial = reach % self.block_tokens if is_last else 0
        return ExportRange(
            request_id=sequence.request_id,
            first_block=first,
            block_ids=tuple(sequence.blocks[first:end]),
            last_block_tokens=partial or self.block_tokens,
            in_cache=False,
            is_last=is_last,
        )
