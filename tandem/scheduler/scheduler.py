"""Decides what runs in the next step. A pure class without clock and tensors: state in, plan out.

Continuous batching with chunked prefill under a token budget (Sarathi-Serve, OSDI'24). Decoding requests come first,
with one token each; the rest of the budget goes to prompts in order of arrival, and then to proposed tokens. If a
decoding request needs a block and none is available, the youngest running request is preempted: its blocks are
released, and it is recomputed later, except for blocks that are still in the pool or its host tier.

With a `BatchRule`, requests are collected while a batch runs, and become the next one when it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain

from tandem.errors import ContextExceeded, InputError, InternalError, KvExhausted, RequestFailed, TandemError
from tandem.kvcache.block_pool import BlockHold, BlockPool
from tandem.kvcache.layout import blocks_for
from tandem.scheduler.batching import BatchRule
from tandem.scheduler.plan import Chunk, ExportRange, StepPlan, cached_range, computed_range, shared_tokens
from tandem.scheduler.prompt_limit import PromptLimit
from tandem.scheduler.proposing import ProposalRoom, with_proposals
from tandem.scheduler.sequence import Sequence, SequenceStage
from tandem.scheduler.sequence_blocks import SequenceBlocks
from tandem.speculation.proposers import Branch, Verified
from tandem.speculation.speculator import Speculator


def _priority(sequence: Sequence) -> tuple[bool, int, int]:
    """Sort key: decoding requests first, then by last step, so that all get a turn when they exceed the budget."""
    return sequence.pending_tokens > 1, sequence.last_step, sequence.arrival


@dataclass(slots=True)
class Scheduler:
    """Owns the sequences and their blocks (`window_tokens`, `caches`: as SequenceBlocks has them)."""

    pool: BlockPool
    block_tokens: int
    max_running_requests: int
    max_step_tokens: int
    max_model_tokens: int
    window_tokens: int | None = None
    speculator: Speculator | None = None
    batches: BatchRule | None = None  # None: continuous batching
    prompt_limit: PromptLimit | None = None  # None: max_step_tokens alone limits prompts
    caches: bool = True
    preemptions: int = field(default=0, init=False)
    _blocks: SequenceBlocks = field(init=False)
    _sequences: dict[str, Sequence] = field(default_factory=dict)
    _collected: list[Sequence] = field(default_factory=list)  # in order of arrival
    _waiting: deque[Sequence] = field(default_factory=deque)  # of the batch, if there are batches
    _running: list[Sequence] = field(default_factory=list)
    _failed: list[tuple[str, TandemError]] = field(default_factory=list)
    _began: list[str] = field(default_factory=list)
    _exports: list[ExportRange] = field(default_factory=list)  # of held requests, for the next step
    _steps: int = 0
    _short_of_blocks: bool = False  # a request had to wait for blocks in the last step
    _stalled: bool = False  # nothing can run until handoffs release blocks

    def __post_init__(self) -> None:
        self._blocks = SequenceBlocks(self.pool, self.block_tokens, self.window_tokens, self.caches)

    # --- requests ----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._check(sequence)
        self._sequences[sequence.request_id] = sequence
        sequence.expected_cached_tokens = len(self._blocks.match(sequence)) * self.block_tokens
        if self.batches is not None:
            sequence.stage = SequenceStage.COLLECTED
            self._collected.append(sequence)
            return
        self._waiting.append(sequence)
        self._stalled = False

    def collect(self, now_s: float) -> float | None:
        """With static and dynamic batching, begins the next batch if it is due, and otherwise returns when it will be
        if no request comes or leaves. None: there is none to wait for."""
        if self.batches is None or not self._collected or self._has_batch:
            return None
        count, begins_s = self.batches.next_batch(self._collected, self.pool.available(), self.block_tokens)
        if now_s < begins_s:
            return begins_s
        batch, self._collected = self._collected[:count], self._collected[count:]
        for sequence in batch:
            sequence.stage = SequenceStage.WAITING
        self._waiting.extend(batch)
        self._stalled = False
        return None

    @property
    def _has_batch(self) -> bool:
        """Whether a request of the last batch is left. One that is moved away is, until it has left."""
        held = (sequence.stage is SequenceStage.HELD for sequence in self._sequences.values())
        return bool(self._waiting or self._running) or any(held)

    def reserve(self, sequence: Sequence) -> int:
        """Leases blocks for the whole prompt; returns how many leading ones are cached here.

        The pool's copies must be done before the other blocks are written.

        Raises:
            KvExhausted: too few blocks are available, or waiting requests need them. Nothing is changed.
        """
        self._check(sequence)
        if len(self._sequences) - len(self._collected) >= self.max_running_requests:
            raise KvExhausted(
                f"this worker is at its limit of {self.max_running_requests} requests: try another worker, or retry"
            )
        if self._short_of_blocks and (self._waiting or self._running):
            raise KvExhausted("other requests on this worker wait for KV blocks: try another worker, or retry")
        full = sequence.prompt_tokens // self.block_tokens
        cached = self.pool.match(sequence.hashes(full)) if sequence.use_prefix_cache else []
        needed = blocks_for(sequence.prompt_tokens, self.block_tokens)
        sequence.blocks = self.pool.acquire(cached, needed - len(cached), BlockHold.LEASE)
        sequence.committed = len(cached)
        sequence.cached_tokens = len(cached) * self.block_tokens
        sequence.hold, sequence.stage = BlockHold.LEASE, SequenceStage.RESERVED
        self._sequences[sequence.request_id] = sequence
        return len(cached)

    def join(self, request_id: str, first_token: int) -> None:
        """Starts decoding from the next step on, after the reserved blocks were filled."""
        sequence = self._get(request_id, SequenceStage.RESERVED)
        if sequence.sampling.max_tokens <= 1 or sequence.prompt_tokens + 1 >= self.max_model_tokens:
            raise InputError("max_tokens: expected more than one token for a join", field="max_tokens")
        self._blocks.convert(sequence, BlockHold.USE)
        sequence.computed = sequence.scored_tokens = sequence.prompt_tokens
        sequence.tokens.append(first_token)
        self._blocks.commit(sequence)
        sequence.stage = SequenceStage.RUNNING
        self._running.append(sequence)
        self._stalled = False

    def hold(self, request_id: str) -> bool:
        """Removes a decoding request from the batch and keeps its blocks. Returns False if it is not decoding."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.stage is not SequenceStage.RUNNING or sequence.is_exporting:
            return False
        if sequence.pending_tokens > 1 or not sequence.generated or sequence.passed_blocks:
            return False  # released blocks cannot be handed over
        self._running.remove(sequence)
        sequence.stage = SequenceStage.HELD
        return True

    def resume(self, request_id: str) -> None:
        """Resumes decoding a held request from the next step on."""
        sequence = self._get(request_id, SequenceStage.HELD)
        sequence.stage = SequenceStage.RUNNING
        self._running.append(sequence)
        self._stalled = False

    def export_held(self, request_id: str, first_block: int) -> int:
        """Exports a held request's blocks from `first_block` on in the next step. Returns the number of tokens they
        hold: all but the last, whose KV is not computed yet."""
        sequence = self._get(request_id, SequenceStage.HELD)
        if first_block * self.block_tokens >= sequence.computed:
            return sequence.computed
        self._exports.append(
            ExportRange(
                request_id=request_id,
                first_block=first_block,
                block_ids=tuple(sequence.blocks[first_block : blocks_for(sequence.computed, self.block_tokens)]),
                last_block_tokens=sequence.computed % self.block_tokens or self.block_tokens,
                in_cache=True,
                is_last=True,
            )
        )
        return sequence.computed

    def release_export(self, request_id: str) -> None:
        self._remove(self._get(request_id, SequenceStage.EXPORTED))

    def cancel(self, request_id: str) -> bool:
        """Removes a request and releases its blocks, in any stage. Returns False if it is unknown."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def finish(self, sequence: Sequence) -> None:
        """Ends a running sequence. An exporting request keeps its blocks leased, even if it failed: agents may read
        them."""
        if sequence.is_exporting:
            self._running.remove(sequence)
            self._blocks.convert(sequence, BlockHold.LEASE)
            sequence.stage = SequenceStage.EXPORTED
        else:
            self._remove(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Makes all of a running sequence's blocks no longer findable, because their KV cannot be trusted."""
        self._blocks.forget(sequence)

    def _check(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise InputError("request_id: expected an unused id", field="request_id")
        prompt = sequence.prompt_tokens
        if prompt >= self.max_model_tokens:
            raise ContextExceeded(
                f"prompt: expected fewer than {self.max_model_tokens} tokens (the context), got {prompt}",
                field="prompt",
            )
        total = self.pool.counts().total
        if blocks_for(prompt + 1, self.block_tokens) > total:
            raise ContextExceeded(
                f"prompt: expected fewer than {total * self.block_tokens} tokens (all {total} KV blocks of a worker), "
                f"got {prompt}",
                field="prompt",
            )

    def _get(self, request_id: str, stage: SequenceStage) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.stage is not stage:
            raise InternalError(f"request {request_id} is not {stage}")
        return sequence

    def _remove(self, sequence: Sequence) -> None:
        if sequence.stage is SequenceStage.COLLECTED:
            self._collected.remove(sequence)
        elif sequence.stage is SequenceStage.WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is SequenceStage.RUNNING:
            self._running.remove(sequence)
        self._blocks.release(sequence)
        self._exports = [each for each in self._exports if each.request_id != sequence.request_id]
        del self._sequences[sequence.request_id]
        self._stalled = False

    # --- steps -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do something. False if all remaining requests wait for blocks that handoffs hold."""
        return bool(self._exports) or (bool(self._waiting or self._running) and not self._stalled)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._collected)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def reserved(self) -> int:
        """Number of requests whose blocks are being imported or handed over."""
        return sum(
            sequence.stage in (SequenceStage.RESERVED, SequenceStage.HELD) for sequence in self._sequences.values()
        )

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens not yet computed, without those that waiting requests will find in the cache."""
        waiting = chain(self._waiting, self._collected)
        unstarted = sum(sequence.pending_tokens - sequence.expected_cached_tokens for sequence in waiting)
        return unstarted + sum(max(0, sequence.pending_tokens - 1) for sequence in self._running)

    def schedule(self) -> StepPlan:
        """Plans a step. A request for which an unexpected error comes up ends; the others are planned."""
        self._steps += 1
        self._short_of_blocks = False
        chunks: list[Chunk] = []
        for sequence in self._running:
            self._blocks.release_branches(sequence)  # of a step whose output was not used
        running = [sequence for sequence in self._running if not sequence.is_awaiting_mask] or self._running
        is_limited = self.prompt_limit is not None and any(each.is_answering for each in self._running)
        budget = whole = self._budget(running, is_limited=is_limited)
        for sequence in sorted(running, key=_priority):
            count = min(sequence.pending_tokens, budget)
            # Otherwise it was preempted in this step for an older request.
            if sequence.stage is SequenceStage.RUNNING and count:
                try:
                    count = self._find_room(sequence, count)
                    chunks += [Chunk.next_of(sequence, count)] if count else []
                    budget -= count
                except Exception as error:
                    self._fail_by(sequence, error)
        chunks = [chunk for chunk in chunks if chunk.sequence.stage is SequenceStage.RUNNING]
        exports, self._exports = self._exports, []
        exports += self._admit(chunks, budget)
        beside_answers = sum(chunk.count for chunk in chunks if not chunk.sequence.is_answering) if is_limited else 0
        if self.speculator is not None and not self._short_of_blocks and not self.speculator.rests():
            room = self._proposal_room(whole if beside_answers else self.max_step_tokens)
            chunks = with_proposals(chunks, self.speculator, room)
        for chunk in chunks:
            chunk.sequence.last_step = self._steps
            try:
                if (export := computed_range(chunk, self.block_tokens)) is not None:
                    exports.append(export)
            except Exception as error:
                self._fail_by(chunk.sequence, error)
        if self._failed:
            gone = {request_id for request_id, _ in self._failed}
            chunks = [chunk for chunk in chunks if chunk.sequence.request_id not in gone]
            exports = [export for export in exports if export.request_id not in gone]
        elif not chunks:
            self._unblock()
        failed, self._failed = tuple(self._failed), []
        began, self._began = tuple(self._began), []
        copies = self.pool.take_copies()
        return StepPlan(tuple(chunks), tuple(exports), failed, began, copies, beside_answers)

    def _budget(self, running: list[Sequence], *, is_limited: bool) -> int:
        """Tokens of the next step; if it is limited, of its answers and as many prompt tokens as may go with them."""
        if self.prompt_limit is None or not is_limited:
            return self.max_step_tokens
        answers = sum(sequence.is_answering for sequence in running)
        return min(self.max_step_tokens, answers + self.prompt_limit.tokens)

    def continues(self, plan: StepPlan) -> bool:
        """Whether the step after `plan` certainly has the same requests in the same order, with one token each, if none
        of them ends."""
        order = [chunk.sequence.arrival for chunk in plan.chunks]
        return (
            len(order) == len(self._running)
            and order == sorted(order)
            and all(chunk.samples and not chunk.proposes and chunk.sequence.generated for chunk in plan.chunks)
            and not (self._waiting or self._exports)
            and self.pool.available() >= len(order)
        )

    def advance(self, plan: StepPlan, without: Collection[Sequence] = ()) -> dict[Sequence, TandemError]:
        """Records that the plan was executed, but for the sequences `without`: its tokens' KV is in the pool, except
        proposed ones (`accept`). Returns the sequences for which this failed: the caller ends them."""
        failed: dict[Sequence, TandemError] = {}
        for chunk in plan.chunks:
            if chunk.sequence in without:
                continue
            chunk.sequence.computed = chunk.start + chunk.count
            try:
                self._blocks.settle(chunk.sequence)
            except TandemError:
                raise
            except Exception as error:
                failed[chunk.sequence] = RequestFailed.by(error)
        return failed

    def accept(self, chunk: Chunk, verified: Verified, branch: Branch | None = None) -> None:
        """Records that of an executed chunk's proposed tokens those that `verified` counts are the answer's, to which
        they were appended, the last ones those of `branch`. The KV of the others will be overwritten."""
        sequence = chunk.sequence
        if self.speculator is not None and sequence.speculation is not None:
            self.speculator.learn(sequence.speculation, verified)
        if branch is not None:
            sequence.take_branch(branch, verified.start - 1)
        self._blocks.release_branches(sequence)
        # The last token is computed in the next step, for its logits.
        accepted = verified.accepted + verified.of_branch
        sequence.computed = min(sequence.computed + accepted, len(sequence.tokens) - 1)
        self._blocks.settle(sequence)
        self._blocks.release_unused(sequence)

    def _proposal_room(self, step_tokens: int) -> ProposalRoom:
        return ProposalRoom(
            self.pool, self.block_tokens, step_tokens, self.max_model_tokens, running=len(self._running)
        )

    def _find_room(self, sequence: Sequence, count: int) -> int:
        """Allocates blocks for a running request's next `count` tokens; returns how many tokens fit.

        If not even one fits, younger requests are preempted. If none is left, this request waits and keeps its blocks.
        """
        held = len(sequence.blocks)
        least = blocks_for(sequence.computed + 1, self.block_tokens) - held
        while least > self.pool.available() and (victim := self._youngest(than=sequence)) is not None:
            self._preempt(victim)
        fresh = blocks_for(sequence.computed + count, self.block_tokens) - held
        if fresh > self.pool.available():
            fresh = self.pool.available()
            self._short_of_blocks = True
        if fresh > 0:
            sequence.blocks += self.pool.acquire([], fresh, BlockHold.USE)
        return min(count, len(sequence.blocks) * self.block_tokens - sequence.computed)

    def _youngest(self, than: Sequence | None = None) -> Sequence | None:
        """The request to preempt: the youngest running one, later than `than`, whose blocks are not being read."""
        able = (each for each in self._running if not each.is_pinned and (than is None or each.arrival > than.arrival))
        return max(able, key=lambda each: each.arrival, default=None)

    def _admit(self, chunks: list[Chunk], budget: int) -> list[ExportRange]:
        """Starts waiting requests in order while their first chunks fit, and adds the chunks to `chunks`.

        A request that shares its beginning with one being computed keeps waiting in this step.
        """
        exports: list[ExportRange] = []
        if not self._waiting:
            return exports
        followers = 0  # at the front of the queue
        most_running = self.max_running_requests - self.reserved  # those that join or go on need a place
        # Start no request while another lacks blocks, or a preempted one would take them back at once.
        while (
            len(self._waiting) > followers
            and budget
            and not self._short_of_blocks
            and len(self._running) < most_running
        ):
            sequence = self._waiting[followers]
            try:
                if self._follows(sequence, chunks, budget):
                    followers += 1
                    continue
                if not self._start(sequence, budget):
                    self._short_of_blocks = True
                    break
                export = cached_range(sequence, self.block_tokens)
            except Exception as error:
                self._fail_by(sequence, error)
                continue
            if export is not None:
                exports.append(export)
            count = min(sequence.pending_tokens, budget)
            chunks.append(Chunk.next_of(sequence, count))
            budget -= count
        return exports

    def _follows(self, sequence: Sequence, chunks: list[Chunk], budget: int) -> bool:
        """Whether another request computes most of this one's first chunk in this step, so it will be cached in the
        next. Of several requests with one prompt, only the first then computes it."""
        for chunk in chunks:
            if chunk.count > 1 and (shared := shared_tokens(sequence, chunk, self.block_tokens)):
                uncached = len(sequence.tokens) - chunk.sequence.committed * self.block_tokens
                if 2 * shared >= min(uncached, budget):
                    return True
        return False

    def _start(self, sequence: Sequence, budget: int) -> bool:
        """Starts a waiting request if its first chunk fits and leaves a block for each running request. With less room
        it would soon be preempted."""
        cached = self._blocks.match(sequence)
        computed = len(cached) * self.block_tokens
        fresh = blocks_for(min(len(sequence.tokens), computed + budget), self.block_tokens) - len(cached)
        try:
            sequence.blocks = self.pool.acquire(cached, fresh, BlockHold.USE, spare=len(self._running))
        except KvExhausted:
            return False
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.stage, sequence.hold = SequenceStage.RUNNING, BlockHold.USE
        sequence.computed, sequence.committed = computed, len(cached)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = computed
            self._began.append(sequence.request_id)
        return True

    def _unblock(self) -> None:
        """Resolves a step in which nothing can run.

        If handoffs or requests that move hold blocks, wait for them. Otherwise running requests block each other, and
        one is preempted. If none can be, or a single request needs more blocks than exist, it fails.
        """
        if not (self._waiting or self._running):
            return
        if self.pool.counts().leased or any(each.stage is SequenceStage.HELD for each in self._sequences.values()):
            self._stalled = True
        elif len(self._running) > 1 and (victim := self._youngest()) is not None:
            self._preempt(victim)
        else:
            last = self._running[-1] if self._running else self._waiting[0]
            tokens, total = len(last.tokens), self.pool.counts().total
            fits = blocks_for(tokens, self.block_tokens) <= total
            found = "found no room beside other requests" if fits else "do not fit"
            self._fail(last, KvExhausted(f"{tokens} tokens {found} in {total} KV blocks: retry later"))

    def _preempt(self, sequence: Sequence) -> None:
        """Moves a running request back to the front of the queue."""
        self.preemptions += 1
        self._short_of_blocks = True
        self._running.remove(sequence)
        self._blocks.release(sequence)
        sequence.computed = sequence.committed = 0
        if sequence.speculation is not None:
            sequence.speculation.moved()
        sequence.stage = SequenceStage.WAITING
        sequence.expected_cached_tokens = len(self._blocks.match(sequence)) * self.block_tokens
        self._waiting.appendleft(sequence)

    def _fail_by(self, sequence: Sequence, error: Exception) -> None:
        """Typed errors are the pool's: they are raised again."""
        if isinstance(error, TandemError):
            raise error
        self._fail(sequence, RequestFailed.by(error))

    def _fail(self, sequence: Sequence, error: TandemError) -> None:
        if sequence.stage is SequenceStage.RUNNING:
            self.finish(sequence)
        else:
            self._remove(sequence)
        self._failed.append((sequence.request_id, error))
