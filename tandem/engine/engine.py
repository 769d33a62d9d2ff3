"""Tandem's own engine: combines scheduler, model and sampling in steps. It is independent of routers and transfers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tandem.clock import Clock, SystemClock
from tandem.engine.api import (
    Capability,
    EngineLoad,
    EngineRequest,
    RequestEnd,
    Reservation,
    StepResult,
    TextEngine,
    TokenOut,
)
from tandem.engine.loop.chooser import TokenChooser
from tandem.engine.loop.flight import Flight, first_samples, prompt_scores, work_of
from tandem.engine.loop.following import choose_on_device, take_following
from tandem.engine.loop.intake import Intake
from tandem.engine.loop.launcher import Launcher
from tandem.engine.output import StepOutput
from tandem.engine.runner import ModelRunner
from tandem.engine.step import StepInput
from tandem.engine.step_work import StepWork
from tandem.errors import HandoffError
from tandem.grammar.masks import Grammars
from tandem.kvcache.block_pool import CacheEvent
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence
from tandem.speculation.speculator import Speculator

log = logging.getLogger(__name__)

_NO_OUTPUT = StepOutput([], [], [])


class TandemEngine(TextEngine):
    """An `Engine` (tandem/engine/api.py).

    Args: `send_to_followers` sends a step to the other ranks before this rank runs it. `check_failed_alike` is
    called after a step failed here; it raises WorkerLost unless the step failed on those ranks at the same place.
    `grammars` None: requests with a grammar are refused. `clock` tells static and dynamic batching how long requests
    wait. `lacks`: what it does not do with this checkpoint."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        vocab_size: int,
        send_to_followers: Callable[[StepInput], None] | None,
        check_failed_alike: Callable[[], None] | None = None,
        grammars: Grammars | None = None,
        clock: Clock | None = None,
        lacks: frozenset[Capability] = frozenset(),
    ) -> None:
        self._lacks = lacks | {Capability.IMAGES, *(() if grammars is not None else (Capability.GRAMMARS,))}
        self._runner = runner
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._clock = clock or SystemClock()
        self._intake = Intake(scheduler, vocab_size, grammars, self._clock, samples_on_device=runner.samples_on_device)
        self._launcher = Launcher(runner, scheduler, send_to_followers, check_failed_alike)
        self._chooser = TokenChooser(scheduler, self._end)
        self._flight: Flight | None = None  # launched ahead
        self._ending: list[Sequence] = []  # ended, but still in that step

    # --- requests ----------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._scheduler.add(self._intake.sequence(request))

    def reserve(self, request: EngineRequest) -> Reservation:
        sequence = self._intake.sequence(request)
        cached_blocks = self._scheduler.reserve(sequence)
        if (copies := self._scheduler.pool.take_copies()) is not None:
            # Now, because others may write to the blocks next.
            self._launcher.launch_on_all(StepInput([], [], copies=copies))
        return Reservation(
            request_id=request.request_id,
            block_ids=tuple(sequence.blocks),
            first_missing_block=cached_blocks,
            cached_tokens=cached_blocks * self._scheduler.block_tokens,
        )

    def join(self, request_id: str, first_token: int) -> None:
        self._intake.check_tokens([first_token], "first_token")
        self._scheduler.join(request_id, first_token)

    def cancel(self, request_id: str) -> bool:
        self._finish_ended()
        self._discard_output(request_id)
        return self._scheduler.cancel(request_id)

    def hold(self, request_id: str) -> bool:
        self._finish_ended()
        held = self._scheduler.hold(request_id)
        if held:
            self._discard_output(request_id)
        return held

    def resume(self, request_id: str) -> None:
        self._scheduler.resume(request_id)

    def export_held(self, request_id: str, first_block: int) -> int:
        return self._scheduler.export_held(request_id, first_block)

    def release_export(self, request_id: str) -> None:
        self._scheduler.release_export(request_id)

    # --- steps -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._flight is not None or self._scheduler.has_work

    def collect(self) -> float | None:
        now_s = self._clock.now_s()
        due_s = self._scheduler.collect(now_s)
        return None if due_s is None else due_s - now_s

    @property
    def is_collecting(self) -> bool:
        return self._scheduler.batches is not None and self._scheduler.waiting > 0 and not self.has_work

    def step(self) -> StepResult:
        flight = self._flight or self._launcher.launch(self._scheduler.schedule())
        self._flight = self._launcher.launch_ahead(flight)
        result = self._land(flight)
        if self.speculator is not None:
            self._learn_costs(self.speculator, flight, result.work)
        limit, tokens = self._scheduler.prompt_limit, flight.plan.beside_answers
        if limit is not None and tokens:  # never launched ahead
            limit.learn(tokens, flight.seconds)
        return result

    def _learn_costs(self, speculator: Speculator, flight: Flight, work: StepWork) -> None:
        # A preempted answer that is computed again comes in longer chunks.
        decodes = not work.prefill_tokens and all(chunk.count == 1 for chunk in flight.plan.chunks)
        if decodes and not flight.step.ahead:
            speculator.costs.learn(work.decode_tokens, flight.seconds - flight.draft_seconds)
        drafter = self._runner.drafter
        if drafter is not None and flight.draft_seconds and drafter.passes:
            speculator.pass_costs.learn(drafter.rows // drafter.passes, flight.draft_seconds / drafter.passes)

    def _land(self, flight: Flight) -> StepResult:
        """Waits for the device and processes the step's output."""
        plan, early = flight.plan, None
        if self._runner.samples_on_device:
            take_following(flight, found_only=True)
            early = choose_on_device(flight, (), self._vocab_size)  # runs right after the step
        before = frozenset(flight.following) if flight.following else ()
        output = flight.launched.wait() if flight.launched is not None else _NO_OUTPUT
        flight.seconds = time.perf_counter() - flight.began_s
        if self._ending:
            self._finish_ended()
        scores = prompt_scores(flight, output)
        take_following(flight)
        for choice in (early, choose_on_device(flight, before, self._vocab_size)):
            if choice is not None:
                output = output.with_choice(choice)
        if not flight.has_advanced:
            flight.failed |= self._scheduler.advance(plan, without=flight.discarded)
        tokens: list[TokenOut] = []
        ended = [RequestEnd(request_id, error=error) for request_id, error in plan.failed]
        for sequence in flight.failed.keys() - flight.discarded:
            self._end(sequence)
            flight.discarded.add(sequence)
            ended.append(RequestEnd(sequence.request_id, error=flight.failed[sequence]))
        for request_id in output.failed_exports:  # also of requests that have ended here: their blocks are leased
            for sequence in (chunk.sequence for chunk in plan.chunks if chunk.sequence.request_id == request_id):
                if sequence not in flight.discarded:
                    self._end(sequence)
                    flight.discarded.add(sequence)
            ended.append(RequestEnd(request_id, error=HandoffError("its KV blocks could not be exported: try again")))
        accepted: dict[Sequence, int] = {}
        for chunk, sample in first_samples(plan):
            sequence = chunk.sequence
            if sequence not in flight.discarded:
                if flight.has_advanced:
                    sequence.tokens.pop()
                if sample in output.late and self._flight is not None:
                    self._flight.discarded.add(sequence)  # computed with another token, and computed again
                following = flight.following.get(sequence)
                accepted[sequence] = self._chooser.choose(chunk, output, sample, following, tokens, ended)
        for end in ended:
            if end.error is not None and end.error.__cause__ is not None:
                log.error("request %s: %s", end.request_id, end.error, exc_info=end.error.__cause__)
        return StepResult(tuple(tokens), tuple(ended), tuple(scores), work_of(plan, accepted), plan.began)

    def _finish_ended(self) -> None:
        """Waits for the step launched ahead, and finishes the sequences that ended before it."""
        if self._flight is not None and self._flight.launched is not None:
            self._flight.launched.wait()
        for sequence in self._ending:
            self._scheduler.finish(sequence)
        self._ending = []

    def _discard_output(self, request_id: str) -> None:
        """Discards this request's output of the step launched ahead."""
        if self._flight is not None:
            sequences = [chunk.sequence for chunk in self._flight.plan.chunks]
            self._flight.discarded.update(each for each in sequences if each.request_id == request_id)

    def _end(self, sequence: Sequence) -> None:
        """Ends a sequence. Its blocks are freed once no step writes to them."""
        if self._flight is None:
            self._scheduler.finish(sequence)
        else:
            self._flight.discarded.add(sequence)
            self._ending.append(sequence)

    def idle_tick(self) -> None:
        """Sends a heartbeat to waiting followers."""
        self._launcher.heartbeat()

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._launcher.stop()

    def report_layers(self, after_layer: Callable[[], None]) -> None:
        self._runner.after_layer = after_layer

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def can(self) -> frozenset[Capability]:
        return frozenset(Capability) - self._lacks

    @property
    def proposer(self) -> str:
        return "" if self.speculator is None else self.speculator.proposer.name

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            scheduler.waiting,
            scheduler.running,
            scheduler.waiting_tokens,
            scheduler.pool.counts(),
            scheduler.reserved,
            scheduler.pool.tier_counts(),
        )

    @property
    def speculator(self) -> Speculator | None:
        """None: nothing is proposed."""
        return self._scheduler.speculator

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    def take_cache_events(self) -> list[CacheEvent]:
        return self._scheduler.pool.take_events()
