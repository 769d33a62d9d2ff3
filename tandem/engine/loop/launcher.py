"""Launches steps on all ranks, also ahead of the one that runs, and finds whose fault a failed one is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tandem.engine.allocation_failures import is_out_of_memory, leaves_device_unusable, lost_for_memory, return_unused
from tandem.engine.loop.flight import Flight
from tandem.engine.loop.following import prepare_masks
from tandem.engine.output import Launched
from tandem.engine.runner import ModelRunner
from tandem.engine.step import HEARTBEAT, STOP, Drafted, SequenceStep, StepInput
from tandem.engine.step_inputs import sequence_step
from tandem.errors import RequestFailed, TandemError, UnavailableError, WorkerLost
from tandem.scheduler.plan import StepPlan
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

_UNKNOWN = 0  # placeholder for a token that is still on the device


class Launcher:
    """Args: `send_to_followers` sends a step to the other ranks before this rank runs it. `check_failed_alike` is
    called after a step failed here; it raises WorkerLost unless the step failed on those ranks at the same place."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        send_to_followers: Callable[[StepInput], None] | None,
        check_failed_alike: Callable[[], None] | None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._send_to_followers = send_to_followers
        self._check_failed_alike = check_failed_alike
        self._stepwise: set[Sequence] = set()  # a step launched ahead failed with them: none is launched ahead
        self._computed_token = 0  # that the model has computed, at the latest

    def launch(self, plan: StepPlan) -> Flight:
        """Launches a step on all ranks, unless the plan is empty.

        If memory runs out, the request with the largest chunk fails and the others run again. So they do after any
        other failure, if it is that of single requests.
        """
        prepare_masks(chunk for chunk in plan.chunks if chunk.draft is None)  # while the model computes
        while True:
            plan, inputs = self._inputs(plan)
            step = StepInput(inputs, [*plan.exports], copies=plan.copies)
            if not (plan.chunks or plan.exports or plan.copies):
                return Flight(plan, step, None)
            try:
                flight = Flight(plan, step, None)
                drafts = any(chunk.draft is not None for chunk in plan.chunks)
                told = partial(self._take_drafted, flight) if drafts else None
                flight.launched = self.launch_on_all(step, told)
                self._computed_token = inputs[0].token_ids[0] if inputs else self._computed_token
                return flight
            except TandemError:
                raise
            except Exception as error:
                if any(chunk.draft or chunk.proposed for chunk in plan.chunks) and not leaves_device_unusable(
                    error, on_device=self._runner.samples_on_device
                ):
                    log.warning("a step with proposed tokens failed, and runs without", exc_info=True)
                    plan = self._without_proposals(plan)
                    continue
                failed = self._failed_by(error, plan, inputs) if plan.chunks else {}
                if not failed and is_out_of_memory(error):
                    raise lost_for_memory(error) from error
                if not failed:
                    raise
            return_unused()  # after the exception, which kept the step's tensors
            plan = self._without(plan, failed, is_launched=True)

    def launch_ahead(self, flight: Flight) -> Flight | None:
        """Launches the step after `flight` if its inputs are known, so that the device does not wait for the host.

        A sequence that ends with `flight` then gets one token too many, which is discarded. If the launch fails, the
        step runs after `flight`, where `launch` finds out why.
        """
        scheduler, plan = self._scheduler, flight.plan
        if self._stepwise and not self._stepwise.isdisjoint(chunk.sequence for chunk in plan.chunks):
            return None
        if scheduler.speculator is not None and not scheduler.speculator.is_resting:
            return None  # what is proposed next depends on the tokens of this step
        if flight.discarded or not self._runner.can_be_ahead_of(flight.step) or not scheduler.continues(plan):
            return None
        if any(
            chunk.sequence.ends_at(len(chunk.sequence.tokens) + 1, scheduler.max_model_tokens) for chunk in plan.chunks
        ):
            return None
        flight.failed = scheduler.advance(plan)
        flight.has_advanced = True
        for chunk in plan.chunks:
            chunk.sequence.tokens.append(_UNKNOWN)
        return None if flight.failed else self._launched_ahead(flight, scheduler.schedule())

    def launch_on_all(self, step: StepInput, drafted: Callable[[list[Drafted]], None] | None = None) -> Launched | None:
        """Launches a step here and on the other ranks. It may end later."""
        if self._scheduler.speculator is not None and step.sequences:
            self._scheduler.speculator.step += 1
        launch = self._runner.launch if drafted is None else partial(self._runner.launch, drafted=drafted)
        if self._send_to_followers is None:
            return launch(step)
        self._send_to_followers(step)
        try:
            return launch(step)
        except TandemError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise lost_for_memory(error) from error
            if self._check_failed_alike is None or leaves_device_unusable(
                error, on_device=self._runner.samples_on_device
            ):
                raise
            log.warning("a step failed on this rank", exc_info=True)
            self._check_failed_alike()
            raise

    def heartbeat(self) -> None:
        """To waiting followers."""
        if self._send_to_followers is not None:
            self._send_to_followers(HEARTBEAT)

    def stop(self) -> None:
        """Tells the followers to stop."""
        if self._send_to_followers is not None:
            try:
                self._send_to_followers(STOP)
            except WorkerLost:
                pass  # they have stopped already

    def _launched_ahead(self, flight: Flight, plan: StepPlan) -> Flight | None:
        on_device, copies = self._runner.samples_on_device, plan.copies
        try:
            if not plan.failed:
                inputs = [sequence_step(chunk, self._scheduler.block_tokens, on_device) for chunk in plan.chunks]
                step, copies = StepInput(inputs, [*plan.exports], copies=copies, ahead=True), None
                return Flight(plan, step, self.launch_on_all(step))
        except TandemError:
            raise
        except Exception as error:
            if leaves_device_unusable(error, on_device=on_device):
                raise
            log.warning("a step could not be launched ahead: its requests run step by step", exc_info=True)
        failed = {request_id for request_id, _ in plan.failed}
        flight.plan = replace(flight.plan, failed=(*flight.plan.failed, *plan.failed))
        flight.discarded |= {each.sequence for each in flight.plan.chunks if each.sequence.request_id in failed}
        self._stepwise = {chunk.sequence for chunk in plan.chunks}
        if copies is not None:
            self.launch_on_all(StepInput([], [], copies=copies))  # the plan's blocks are taken
        return None

    def _without_proposals(self, plan: StepPlan) -> StepPlan:
        """The plan of a step that was launched. Nothing is proposed any more for its requests."""
        plan = self._without(plan, {}, is_launched=True)
        for chunk in plan.chunks:
            if chunk.draft or chunk.proposed:
                chunk.sequence.speculation = None
        return replace(plan, chunks=tuple(chunk.with_proposal() for chunk in plan.chunks))

    def _take_drafted(self, flight: Flight, drafted: list[Drafted]) -> None:
        """Before the model verifies them."""
        flight.draft_seconds = self._runner.draft_seconds
        pairs = zip(flight.plan.chunks, drafted, strict=True)
        chunks = tuple(
            chunk.with_proposal(found.tokens, chunk.draft, found.beside) if chunk.draft else chunk
            for chunk, found in pairs
        )
        flight.plan = replace(flight.plan, chunks=chunks)
        prepare_masks(chunk for chunk in chunks if chunk.draft is not None)

    def _inputs(self, plan: StepPlan) -> tuple[StepPlan, list[SequenceStep]]:
        """The plan without requests for which making the step's input fails, and the input."""
        inputs: list[SequenceStep] = []
        failed: dict[str, TandemError] = {}
        for chunk in plan.chunks:
            try:
                inputs.append(sequence_step(chunk, self._scheduler.block_tokens, self._runner.samples_on_device))
            except Exception as error:
                failed[chunk.sequence.request_id] = RequestFailed.by(error)
        return (self._without(plan, failed, is_launched=False) if failed else plan), inputs

    def _failed_by(self, error: Exception, plan: StepPlan, inputs: list[SequenceStep]) -> dict[str, TandemError]:
        """The requests to end after a step failed; empty: it is no fault of single requests."""
        if is_out_of_memory(error):
            largest = max(plan.chunks, key=lambda chunk: (chunk.count, chunk.sequence.arrival))
            short = UnavailableError(
                f"a step with {largest.count} tokens of a request ran out of memory: retry later, or lower "
                "engine.max_step_tokens or engine.kv_memory_bytes"
            )
            return {largest.sequence.request_id: short}
        if leaves_device_unusable(error, on_device=self._runner.samples_on_device):
            return {}
        failed: dict[str, TandemError] = {}
        for chunk, sequence in zip(plan.chunks, inputs, strict=True):
            if (cause := self._error_alone(sequence)) is not None:
                failed[chunk.sequence.request_id] = RequestFailed.by(cause)
        is_well = len(failed) < len(plan.chunks) or self._error_alone(self._known_good(inputs[0])) is None
        return failed if is_well else {}

    def _error_alone(self, sequence: SequenceStep) -> Exception | None:
        """The error of a step with this chunk only. What it computes is computed again later."""
        try:
            if (launched := self.launch_on_all(StepInput([sequence], []))) is not None:
                launched.wait()
        except TandemError:
            raise
        except Exception as error:
            return error
        return None

    def _known_good(self, failed: SequenceStep) -> SequenceStep:
        """A chunk that the engine computes unless it is broken: one token, in the last block of a chunk that failed,
        which no other request reads."""
        return SequenceStep([self._computed_token], 0, failed.blocks[-1:], samples=1, greedy=True)

    def _without(self, plan: StepPlan, failed: Mapping[str, TandemError], *, is_launched: bool) -> StepPlan:
        """The plan without requests that failed. If it was launched, its copies are done, and requests end whose
        export has begun, because a range is reported once."""
        interrupted = UnavailableError("a step failed because of another request: retry")
        begun = {each.request_id: interrupted for each in plan.exports} if is_launched else {}
        errors = begun | dict(failed)
        ended = [chunk for chunk in plan.chunks if chunk.sequence.request_id in errors]
        for chunk in ended:
            self._scheduler.finish(chunk.sequence)
        return StepPlan(
            chunks=tuple(chunk for chunk in plan.chunks if chunk not in ended),
            exports=() if is_launched else tuple(each for each in plan.exports if each.request_id not in errors),
            failed=(*plan.failed, *((chunk.sequence.request_id, errors[chunk.sequence.request_id]) for chunk in ended)),
            began=plan.began,
            copies=None if is_launched else plan.copies,
        )
