"""One worker: the engine's scheduler and block pool, driven by a step loop in virtual time.

As in worker.leader, incoming frames are handled between two steps. The cost model gives the duration of a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from planner.cost import LEAST_CHUNK, CostModel, PrefillWork, largest_chunk
from planner.shared_host import BusyCores
from planner.simulator.events import EventLoop
from planner.simulator.links import SimPort
from planner.simulator.measurements import IntervalHistogram
from planner.simulator.scheduler import RepeatingScheduler, SimBlockPool
from planner.simulator.sequence import SimSequence
from planner.simulator.setup import PoolSetup, Setup
from router.prefix_index.mirror import WorkerKey
from router.requests.state_machine import RequestRun
from router.workers.load_account import Account
from tandem.config.model import Role
from tandem.errors import TandemError
from tandem.scheduler.plan import Chunk, ExportRange, StepPlan
from tandem.speculation.proposers import Verified

MAX_REPEATED_STEPS = 256  # they are costed with the context of the middle one


class SimLoad(NamedTuple):
    requests: int  # waiting, running, reserved or exported
    waiting_tokens: int
    available_blocks: int
    total_blocks: int


class WorkerHost(Protocol):
    """Receives a worker's events. `room`: prompts were computed or blocks freed, so waiting requests may fit."""

    def first_token(self, worker: SimWorker, sequence: SimSequence) -> None: ...
    def finished(self, worker: SimWorker, sequence: SimSequence) -> None: ...
    def failed(self, worker: SimWorker, sequence_id: str, error: TandemError) -> None: ...
    def export(self, worker: SimWorker, part: ExportRange, start_s: float, end_s: float) -> None: ...
    def paced(self, worker: SimWorker, batch: int, tokens: int, seconds: float) -> None: ...
    def changed(self, worker: SimWorker, *, room: bool) -> None: ...


@dataclass(slots=True, eq=False)
class SimTicket:
    """One handoff, seen from the decode worker. It joins once the blocks and the router's Join have arrived."""

    decode: SimWorker
    sequence: SimSequence
    cached_blocks: int
    first_token_s: float = 0.0  # when it was sampled
    has_landed: bool = False
    may_join: bool = False


class SimWorker:
    """One epoch of a worker."""

    def __init__(
        self, key: WorkerKey, role: Role, pool: PoolSetup, setup: Setup, loop: EventLoop, host: WorkerHost,
        intervals: IntervalHistogram, cores: BusyCores | None = None,
    ) -> None:  # fmt: skip
        self.key, self.role, self.tp = key, role, pool.tp
        self.blocks = SimBlockPool(pool.kv_tokens // setup.block_tokens)
        self.scheduler = RepeatingScheduler(
            self.blocks,
            setup.block_tokens,
            pool.max_running_requests or setup.max_running_requests,
            pool.max_step_tokens or setup.max_step_tokens,
            setup.max_model_tokens,
            caches=setup.caches,
            batches=pool.batches,
            speculator=None if pool.acceptance is None else pool.acceptance.speculator(),
        )
        self._acceptance, self._longest_step_s = pool.acceptance, pool.longest_step_s
        self.bounds_steps = pool.longest_step_s is not None
        self._most_step_tokens = self.scheduler.max_step_tokens
        self.cost: CostModel = pool.cost
        self.account = Account()
        self.attached: dict[str, RequestRun] = {}  # requests whose events reach the router, by wire id
        self.tickets: dict[str, SimTicket] = {}  # of handoffs in progress, on either side, by wire id
        self.egress, self.ingress = SimPort(), SimPort()
        self.lost = False
        self.busy_s = 0.0
        self.sent_frames = 0
        self.event_seq = 0
        self.events_due = False
        self._seen_frames = 0
        self._loop, self._host, self._intervals = loop, host, intervals
        self._cores = cores
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._load: SimLoad | None = None  # None: recount it
        self._total_blocks = self.blocks.counts().total
        self._stepping, self._began_s = False, 0.0
        self._repeat: tuple[float, float, int, int] | None = None  # start, step time, steps, context
        self._generation = 0  # of the scheduled end of a step; ends of older ones are ignored

    # --- incoming frames -------------------------------------------------------------------------------------------

    def receive(self, frame: int, handle: Callable[..., None], *args: object) -> None:
        """`frame`: its number in the router's session. `handle` runs between two steps."""
        self.notify(self._take_frame, frame, handle, args)

    def notify(self, handle: Callable[..., None], *args: object) -> None:
        """`handle` runs between two steps."""
        if self.lost:
            return
        self._inbox.append((handle, args))
        if not self._stepping:
            self._next_step()
        elif self._repeat is not None:
            self._stop_repeating(self._repeat)

    def lose(self) -> None:
        """Stops at once. Tokens sent before count as sent."""
        if self._stepping:
            self.busy_s += self._loop.now_s() - self._began_s
        if self._repeat is not None:
            start_s, step_s, steps, _ = self._repeat
            done = min(steps - 1, int((self._loop.now_s() - start_s) / step_s))
            for sequence in self.scheduler.repeat(done) if done > 0 else []:
                sequence.last_token_s = start_s + done * step_s
        self.lost = True
        if self._cores is not None:
            self._cores.stop(self)
        self._generation += 1
        self._inbox.clear()

    def _take_frame(self, frame: int, handle: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._seen_frames = max(self._seen_frames, frame)
        handle(*args)

    # --- load ------------------------------------------------------------------------------------------------

    def load(self) -> SimLoad:
        """Its last report, made between two steps; the report acknowledges the frames handled so far."""
        if self.account.unreported_requests:
            self.account.acknowledge(self._seen_frames)
        if self._load is None:
            scheduler = self.scheduler
            self._load = SimLoad(
                len(scheduler.sequences), scheduler.waiting_tokens, scheduler.pool.available(), self._total_blocks
            )
        return self._load

    @property
    def running_requests(self) -> int:
        return self.load().requests + self.account.unreported_requests

    @property
    def outstanding_tokens(self) -> int:
        return self.load().waiting_tokens + self.account.unreported_tokens

    # --- steps ---------------------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        """Handles what came in and begins the next step if there is work."""
        had_frames = bool(self._inbox)
        while self._inbox:
            handle, args = self._inbox.popleft()
            handle(*args)
        self._load = None
        if (due_s := self.scheduler.collect(self._loop.now_s())) is not None:
            self._loop.call_at(due_s, self._resume)
        if self.scheduler.has_work:
            self._begin()
        if had_frames:
            self._host.changed(self, room=False)

    def _begin(self) -> None:
        if self._longest_step_s is not None:
            self.scheduler.max_step_tokens = self._step_tokens_now(self._longest_step_s)
        if self._cores is None and (steps := self.scheduler.steady_steps(MAX_REPEATED_STEPS)):
            self._begin_repeat(steps)
            return
        plan = self.scheduler.schedule()
        for sequence_id, error in plan.failed:
            self._host.failed(self, sequence_id, error)
        if not plan.chunks:
            if self.scheduler.has_work:  # a request was preempted: the next plan has room
                self._loop.call_at(self._loop.now_s(), self._resume)
            return
        now_s = self._loop.now_s()
        prefills = [PrefillWork(each.count, each.start) for each in plan.chunks if each.count > 1]
        decodes = [each for each in plan.chunks if each.count == 1]
        rows, context = sum(1 + each.proposes for each in plan.chunks), sum(each.start + 1 for each in decodes)
        rows -= len(prefills)
        seconds = self.cost.step_s(prefills, rows, context)
        if (speculator := self.scheduler.speculator) is not None and self._acceptance is not None:
            if not prefills:
                speculator.costs.learn(rows, seconds)
            if depth := max(each.proposes for each in plan.chunks):
                pass_s = self._acceptance.draft_share * self.cost.decode_step_s(len(decodes), context)
                speculator.pass_costs.learn(len(decodes), pass_s)
                seconds += depth * pass_s
        for part in plan.exports:
            if part.in_cache:
                self._host.export(self, part, now_s, now_s)
        self._stepping, self._began_s = True, now_s
        self._generation += 1
        if self._cores is None:
            self._loop.call_at(now_s + seconds, self._end, self._generation, plan, now_s)
        else:
            decode_s = self.cost.decode_step_s(rows, context) if prefills else seconds
            decoding = min(1.0, decode_s / seconds) if seconds else 0.0
            self._cores.run(self, self.tp, seconds, partial(self._end, self._generation, plan, now_s), decoding)

    def _step_tokens_now(self, longest_s: float) -> int:
        """All of a step if no prompt is there; beside requests that decode, a prompt gets the least chunk or more."""
        if not self.scheduler.waiting_tokens:
            return self._most_step_tokens
        running = self.scheduler.decoding
        decoding = [each for each in running if each.pending_tokens == 1]
        start = max((each.computed for each in running if each.pending_tokens > 1), default=0)
        batch, context = len(decoding), sum(each.computed + 1 for each in decoding)
        most = self._most_step_tokens - batch
        chunk, _ = largest_chunk(self.cost, most, start, batch, context, longest_s if batch else math.inf)
        return min(batch + max(chunk, LEAST_CHUNK), self._most_step_tokens)

    def _resume(self) -> None:
        if not self._stepping and not self.lost:
            self._next_step()

    def _end(self, generation: int, plan: StepPlan, start_s: float) -> None:
        if generation != self._generation:
            return
        now_s = self._loop.now_s()
        self._stepping = False
        self.busy_s += now_s - start_s
        self.scheduler.advance(plan)
        computed = False
        intervals: list[float] = []
        for chunk in plan.chunks:
            sequence = cast(SimSequence, chunk.sequence)
            computed = computed or chunk.count > 1
            if chunk.samples:
                self._sample(chunk, sequence, now_s, intervals)
        if intervals:
            self._host.paced(self, len(intervals), len(intervals), sum(intervals))
        if self._cores is not None and (tokens := sum(chunk.samples for chunk in plan.chunks)):
            self._cores.spend(self._cores.host.frame_s + self._cores.host.token_s * tokens)
        for part in plan.exports:
            if not part.in_cache:
                self._host.export(self, part, start_s, now_s)
        self._after_step(room=computed)

    def _sample(self, chunk: Chunk, sequence: SimSequence, now_s: float, intervals: list[float]) -> None:
        proposed, accepted = chunk.proposes, 0
        if self._acceptance is not None:
            accepted = self._acceptance.accepted(sequence.index, len(sequence.tokens), proposed)
        is_first = sequence.generated == 0
        for _ in range(1 + accepted):
            sequence.tokens.append(0)
            if sequence.last_token_s > 0:
                interval_s = now_s - sequence.last_token_s
                self._intervals.add(interval_s)
                intervals.append(interval_s)
            sequence.last_token_s = now_s
        if proposed:
            start, compared = chunk.start + chunk.count, min(proposed, accepted + 1)
            self.scheduler.accept(chunk, Verified(start, proposed, compared, accepted, chunk.draft))
        if sequence.is_exporting or sequence.generated >= sequence.sampling.max_tokens:
            self.scheduler.finish(sequence)
        if is_first:
            self._host.first_token(self, sequence)
        if not sequence.is_exporting and sequence.generated >= sequence.sampling.max_tokens:
            self._host.finished(self, sequence)

    def _after_step(self, *, room: bool) -> None:
        self._load = None
        self._host.changed(self, room=room)
        if not self._stepping and not self.lost:
            self._next_step()

    # --- repeated steps ---------------------------------------------------------------------------------------

    def _begin_repeat(self, steps: int) -> None:
        now_s = self._loop.now_s()
        running = self.scheduler.decoding
        context = sum(each.computed + 1 for each in running)
        step_s = self.cost.step_s((), len(running), context + len(running) * (steps - 1) // 2)
        self._repeat = (now_s, step_s, steps, context)
        self._stepping, self._began_s = True, now_s
        self._generation += 1
        self._loop.call_at(now_s + steps * step_s, self._end_repeat, self._generation, steps)

    def _stop_repeating(self, repeat: tuple[float, float, int, int]) -> None:
        """Ends the repetition after the current step: something came in."""
        start_s, step_s, steps, context = repeat
        done = max(1, math.ceil((self._loop.now_s() - start_s) / step_s))
        if done < steps:
            self._repeat = (start_s, step_s, done, context)
            self._generation += 1
            self._loop.call_at(start_s + done * step_s, self._end_repeat, self._generation, done)

    def _end_repeat(self, generation: int, steps: int) -> None:
        if generation != self._generation or self._repeat is None:
            return
        start_s, step_s, _, _ = self._repeat
        self._repeat, self._stepping = None, False
        end_s = start_s + steps * step_s
        self.busy_s += steps * step_s
        participants = self.scheduler.repeat(steps)
        ended = []
        seconds = 0.0
        for sequence in participants:
            first_s = start_s + step_s - sequence.last_token_s
            self._intervals.add(first_s)
            seconds += end_s - sequence.last_token_s
            sequence.last_token_s = end_s
            if sequence.generated >= sequence.sampling.max_tokens:
                ended.append(sequence)
        self._intervals.add(step_s, (steps - 1) * len(participants))
        self._host.paced(self, len(participants), steps * len(participants), seconds)
        for sequence in ended:
            self.scheduler.finish(sequence)
            self._host.finished(self, sequence)
        self._after_step(room=bool(ended))
