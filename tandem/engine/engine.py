"""The engine of one worker, on its leader: combines scheduler, model and sampling in steps.

It is independent of routers and transfers. Not thread-safe: the step loop owns it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from tandem.engine.api import EngineLoad, EngineRequest, PromptScores, RequestEnd, Reservation, StepResult, TokenOut
from tandem.engine.memory import is_out_of_memory, leaves_device_unusable, return_unused
from tandem.engine.output import DeviceChoice, Launched, StepOutput
from tandem.engine.runner import ModelRunner
from tandem.engine.step import HEARTBEAT, STOP, SequenceStep, StepInput
from tandem.engine.step_inputs import sequence_step
from tandem.engine.step_work import StepWork
from tandem.errors import (
    HandoffError,
    InputError,
    InternalError,
    RequestFailed,
    TandemError,
    UnavailableError,
    WorkerLost,
)
from tandem.grammar.compiler import Allowed
from tandem.grammar.masks import MASK_WAIT_S, Following, GrammarRun, Grammars, no_grammars
from tandem.kvcache.block_pool import CacheEvent
from tandem.request import FinishReason
from tandem.sampling.sampler import Choice, choose, scored_choice
from tandem.scheduler.plan import Chunk, StepPlan
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence
from tandem.speculation.speculator import Speculation, Speculator

log = logging.getLogger(__name__)

_UNKNOWN = 0  # placeholder for a token that is still on the device
_NO_OUTPUT = StepOutput([], [], [])


@dataclass(slots=True)
class Flight:
    """A step in progress. `discarded` sequences are in it, but their output is not used. `failed` ones end with it."""

    plan: StepPlan
    step: StepInput
    launched: Launched | None
    discarded: set[Sequence] = field(default_factory=set)
    failed: dict[Sequence, TandemError] = field(default_factory=dict)
    has_advanced: bool = False  # the scheduler has counted its tokens
    following: dict[Sequence, Following] = field(default_factory=dict)  # what grammars allow
    began_s: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0  # that the model took


class Engine:
    """Args: `send_to_followers` sends a step to the other ranks before this rank runs it. `check_failed_alike` is
    called after a step failed here; it raises WorkerLost unless the step failed on those ranks at the same place.
    `grammars` None: requests with a grammar are refused."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        vocab_size: int,
        send_to_followers: Callable[[StepInput], None] | None,
        check_failed_alike: Callable[[], None] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._send_to_followers = send_to_followers
        self._check_failed_alike = check_failed_alike
        self._grammars = grammars
        self._arrivals = count()
        self._flight: Flight | None = None  # launched ahead
        self._ending: list[Sequence] = []  # ended, but still in that step
        self._stepwise: set[Sequence] = set()  # a step launched ahead failed with them: none is launched ahead
        self._computed_token = 0  # that the model has computed, at the latest

    # --- requests ----------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Adds a request. Raises InputError, ContextExceeded, or KvExhausted if it could never run."""
        self._scheduler.add(self._sequence(request))

    def reserve(self, request: EngineRequest) -> Reservation:
        """Leases blocks for a prompt whose KV will be imported. Raises KvExhausted if there are too few now."""
        sequence = self._sequence(request)
        cached_blocks = self._scheduler.reserve(sequence)
        if (copies := self._scheduler.pool.take_copies()) is not None:
            self._launch_on_all(StepInput([], [], copies=copies))  # now, because others may write to the blocks next
        return Reservation(
            request_id=request.request_id,
            block_ids=tuple(sequence.blocks),
            first_missing_block=cached_blocks,
            cached_tokens=cached_blocks * self._scheduler.block_tokens,
        )

    def join(self, request_id: str, first_token: int) -> None:
        """Starts decoding after every reserved block was filled."""
        self._check_tokens([first_token], "first_token")
        self._scheduler.join(request_id, first_token)

    def cancel(self, request_id: str) -> bool:
        """Removes a request in any state and frees its blocks. Returns False if it is unknown."""
        self._finish_ended()
        self._discard_output(request_id)
        return self._scheduler.cancel(request_id)

    def hold(self, request_id: str) -> bool:
        """Stops decoding a request and keeps its blocks. Returns False if it is not decoding."""
        self._finish_ended()
        held = self._scheduler.hold(request_id)
        if held:
            self._discard_output(request_id)
        return held

    def resume(self, request_id: str) -> None:
        """Resumes decoding a held request."""
        self._scheduler.resume(request_id)

    def export_held(self, request_id: str, first_block: int) -> int:
        """Exports a held request's blocks from logical block `first_block` on, with the next step. Returns the number
        of tokens whose KV they hold."""
        return self._scheduler.export_held(request_id, first_block)

    def release_export(self, request_id: str) -> None:
        """Releases an exported prompt's blocks, which the receiver no longer reads."""
        self._scheduler.release_export(request_id)

    def _sequence(self, request: EngineRequest) -> Sequence:
        if not request.prompt:
            raise InputError("prompt: expected at least one token, got none", field="prompt")
        self._check_tokens(request.prompt, "prompt")
        if request.sampling.logit_bias:
            self._check_tokens([token for token, _ in request.sampling.logit_bias], "logit_bias")
        if not 0 <= request.answered_tokens < len(request.prompt):
            raise InputError("answer_tokens: expected fewer tokens than the prompt has", field="answer_tokens")
        return Sequence(
            request_id=request.request_id,
            tokens=list(request.prompt),
            prompt_tokens=len(request.prompt),
            sampling=request.sampling,
            hash_key=request.hash_key,
            block_tokens=self._scheduler.block_tokens,
            arrival=next(self._arrivals),
            use_prefix_cache=request.use_prefix_cache,
            export_from_block=request.export_from_block,
            answered_tokens=request.answered_tokens,
            grammar=self._grammar_run(request),
            speculation=Speculation() if self._may_speculate(request) else None,
        )

    def _may_speculate(self, request: EngineRequest) -> bool:
        """A device draws several tokens only if neither penalties nor a grammar let them depend on those before."""
        sampling = request.sampling
        depends = sampling.changes_logits or sampling.grammar is not None
        return self._scheduler.speculator is not None and not (self._runner.samples_on_device and depends)

    def _grammar_run(self, request: EngineRequest) -> GrammarRun | None:
        sampling = request.sampling
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise no_grammars()
        return self._grammars.start(
            sampling.grammar,
            request.hash_key.cache_salt,
            answer_from=len(request.prompt) - request.answered_tokens,
            ends=sampling.stop_token_ids,
            # An export ends with its first token. Logprobs of forced tokens need the logits of each.
            takes_forced=request.export_from_block is None and sampling.logprobs is None,
        )

    def _check_tokens(self, tokens: list[int] | tuple[int, ...], field: str) -> None:
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise InputError(f"{field}: expected token ids from 0 to {self._vocab_size - 1}", field=field)

    # --- steps -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._flight is not None or self._scheduler.has_work

    def step(self) -> StepResult:
        """Runs one step. A failing request does not affect the others."""
        flight = self._flight or self._launch(self._scheduler.schedule())
        self._flight = self._launch_ahead(flight)
        result = self._land(flight)
        if self.speculator is not None and not result.work.prefill_tokens:
            self.speculator.costs.learn(result.work.decode_tokens, flight.seconds)
        return result

    def _launch(self, plan: StepPlan) -> Flight:
        """Launches a step on all ranks, unless the plan is empty.

        If memory runs out, the request with the largest chunk fails and the others run again. So they do after any
        other failure, if it is that of single requests.
        """
        for chunk in plan.chunks:
            if chunk.samples and chunk.sequence.grammar is not None:
                chunk.sequence.grammar.prepare(chunk.sequence.tokens, chunk.proposed)  # while the model computes
        while True:
            plan, inputs = self._inputs(plan)
            step = StepInput(inputs, [*plan.exports], copies=plan.copies)
            if not (plan.chunks or plan.exports or plan.copies):
                return Flight(plan, step, None)
            try:
                began_s = time.perf_counter()
                flight = Flight(plan, step, self._launch_on_all(step), began_s=began_s)
                self._computed_token = inputs[0].token_ids[0] if inputs else self._computed_token
                return flight
            except TandemError:
                raise
            except Exception as error:
                if any(chunk.proposed for chunk in plan.chunks) and not leaves_device_unusable(
                    error, on_device=self._runner.samples_on_device
                ):
                    log.warning("a step with proposed tokens failed, and runs without", exc_info=True)
                    plan = self._without_proposals(plan)
                    continue
                failed = self._failed_by(error, plan, inputs) if plan.chunks else {}
                if not failed and is_out_of_memory(error):
                    raise _out_of_memory(error) from error
                if not failed:
                    raise
            return_unused()  # after the exception, which kept the step's tensors
            plan = self._without(plan, failed, is_launched=True)

    def _without_proposals(self, plan: StepPlan) -> StepPlan:
        """The plan of a step that was launched. Nothing is proposed any more for its requests."""
        plan = self._without(plan, {}, is_launched=True)
        for chunk in plan.chunks:
            if chunk.proposed:
                chunk.sequence.speculation = None
        chunks = [Chunk(each.sequence, each.start, each.count, each.samples) for each in plan.chunks]
        return replace(plan, chunks=tuple(chunks))

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
            if (launched := self._launch_on_all(StepInput([sequence], []))) is not None:
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

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Launches the step after `flight` if its inputs are known, so that the device does not wait for the host.

        A sequence that ends with `flight` then gets one token too many, which is discarded. If the launch fails, the
        step runs after `flight`, where `_launch` finds out why.
        """
        scheduler, plan = self._scheduler, flight.plan
        if self._stepwise and not self._stepwise.isdisjoint(chunk.sequence for chunk in plan.chunks):
            return None
        if scheduler.speculator is not None:
            return None  # what is proposed next depends on the tokens of this step
        if flight.discarded or not self._runner.can_be_ahead_of(flight.step) or not scheduler.continues(plan):
            return None
        if any(self._is_last(chunk.sequence, len(chunk.sequence.tokens) + 1) for chunk in plan.chunks):
            return None
        flight.failed = scheduler.advance(plan)
        flight.has_advanced = True
        for chunk in plan.chunks:
            chunk.sequence.tokens.append(_UNKNOWN)
        return None if flight.failed else self._launched_ahead(flight, scheduler.schedule())

    def _launched_ahead(self, flight: Flight, plan: StepPlan) -> Flight | None:
        on_device, copies = self._runner.samples_on_device, plan.copies
        try:
            if not plan.failed:
                inputs = [sequence_step(chunk, self._scheduler.block_tokens, on_device) for chunk in plan.chunks]
                step, copies = StepInput(inputs, [*plan.exports], copies=copies, ahead=True), None
                return Flight(plan, step, self._launch_on_all(step))
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
            self._launch_on_all(StepInput([], [], copies=copies))  # the plan's blocks are taken
        return None

    def _land(self, flight: Flight) -> StepResult:
        """Waits for the device and processes the step's output."""
        plan, early = flight.plan, None
        if self._runner.samples_on_device:
            self._take_following(flight, found_only=True)
            early = self._choose_on_device(flight, ())  # runs right after the step
        before = frozenset(flight.following)
        output = flight.launched.wait() if flight.launched is not None else _NO_OUTPUT
        flight.seconds = time.perf_counter() - flight.began_s
        if self._ending:
            self._finish_ended()
        scores = _prompt_scores(flight, output)
        self._take_following(flight)
        for choice in (early, self._choose_on_device(flight, before)):
            if choice is not None:
                output = output.with_choice(choice)
        if not flight.has_advanced:
            chunks = tuple(chunk for chunk in plan.chunks if chunk.sequence not in flight.discarded)
            flight.failed |= self._scheduler.advance(replace(plan, chunks=chunks))
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
        for chunk, sample in _first_samples(plan):
            sequence = chunk.sequence
            if sequence not in flight.discarded:
                if flight.has_advanced:
                    sequence.tokens.pop()
                if sample in output.late and self._flight is not None:
                    self._flight.discarded.add(sequence)  # computed with another token, and computed again
                following = flight.following.get(sequence)
                accepted[sequence] = self._choose(chunk, output, sample, following, tokens, ended)
        for end in ended:
            if end.error is not None and end.error.__cause__ is not None:
                log.error("request %s: %s", end.request_id, end.error, exc_info=end.error.__cause__)
        return StepResult(tuple(tokens), tuple(ended), tuple(scores), _work(plan, accepted), plan.began)

    def _launch_on_all(self, step: StepInput) -> Launched | None:
        if self._send_to_followers is None:
            return self._runner.launch(step)
        self._send_to_followers(step)
        try:
            return self._runner.launch(step)
        except TandemError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise _out_of_memory(error) from error
            if self._check_failed_alike is None or leaves_device_unusable(
                error, on_device=self._runner.samples_on_device
            ):
                raise
            log.warning("a step failed on this rank", exc_info=True)
            self._check_failed_alike()
            raise

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

    def _take_following(self, flight: Flight, *, found_only: bool = False) -> None:
        """Takes what grammars allow. Requests for which it is late, or which fail, are left out of the step's output:
        the late ones compute their last chunk again in the next step. `found_only`: only what is known by now, and none
        is late."""
        end_s = time.monotonic() + MASK_WAIT_S
        for chunk in flight.plan.chunks:
            sequence = chunk.sequence
            if not chunk.samples or sequence.grammar is None or sequence in flight.discarded:
                continue
            if sequence in flight.following or sequence in flight.failed:
                continue
            if found_only and not sequence.grammar.has_found(sequence.tokens):
                continue
            try:
                found = sequence.grammar.take(sequence.tokens, end_s - time.monotonic())
            except Exception as error:
                flight.failed[sequence] = error if isinstance(error, TandemError) else RequestFailed.by(error)
                continue
            if found is None:
                flight.discarded.add(sequence)
            else:
                flight.following[sequence] = found

    def _choose_on_device(self, flight: Flight, done: Collection[Sequence]) -> DeviceChoice | None:
        """Lets the device choose among what grammars allow, where that is known, but for `done`. None: nothing is to
        choose."""
        if not flight.following or flight.launched is None:
            return None
        allowed: dict[int, Allowed] = {}
        sampling: dict[int, Sequence] = {}
        inputs = [each for each in flight.step.sequences if each.samples]
        for (chunk, sample), step in zip(_first_samples(flight.plan), inputs, strict=True):
            sequence = sampling[sample] = chunk.sequence
            following = flight.following.get(sequence)
            if following is None or sequence in done or not step.masked:
                continue
            if not following.forced:
                assert following.allowed is not None
                allowed[sample] = following.allowed
            elif sequence.sampling.logprobs is not None:
                allowed[sample] = np.arange(self._vocab_size) == following.forced[0]
        if not allowed:
            return None
        try:
            return flight.launched.choose(allowed)
        except TandemError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise _out_of_memory(error) from error
            if leaves_device_unusable(error, on_device=True):
                raise
            flight.failed |= {sampling[sample]: RequestFailed.by(error) for sample in allowed}
            return None

    def _choose(
        self,
        chunk: Chunk,
        output: StepOutput,
        sample: int,
        following: Following | None,
        tokens: list[TokenOut],
        ended: list[RequestEnd],
    ) -> int:
        """Chooses and reports the token of `sample` in `output`, those after it as long as proposed ones are right, and
        those that its grammar forces. Returns how many proposed ones were right."""
        sequence, compared, accepted = chunk.sequence, 0, 0
        try:
            for proposed in (*chunk.proposed, None):
                choice = self._chosen(sequence, output, sample + accepted, following)
                tokens.append(self._appended(sequence, choice))
                reason = self._reason(sequence, choice.token_id)
                compared += proposed is not None
                accepted += choice.token_id == proposed
                if following is not None and reason is None:
                    reason, following = self._follow(sequence, following, choice.token_id, tokens)
                if reason is not None or choice.token_id != proposed or (sequence.grammar and following is None):
                    break
        except Exception as error:
            typed = error if isinstance(error, TandemError) else RequestFailed.by(error)
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, error=typed))
            return accepted
        if chunk.proposed and (failure := self._accept(chunk, compared, accepted)) is not None:
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, error=failure))
            return accepted
        if reason is not None or sequence.is_exporting:
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, reason))
        return accepted

    def _accept(self, chunk: Chunk, compared: int, accepted: int) -> TandemError | None:
        """Returns the error of a request whose tokens cannot be recorded."""
        try:
            self._scheduler.accept(chunk, compared, accepted)
        except TandemError:
            raise
        except Exception as error:
            return RequestFailed.by(error)
        return None

    def _follow(
        self, sequence: Sequence, following: Following, token: int, tokens: list[TokenOut]
    ) -> tuple[FinishReason | None, Following | None]:
        """Takes what the grammar forces after `token`. Returns why the answer ends, and what may follow in this step if
        that is known."""
        assert sequence.grammar is not None
        after = sequence.grammar.after(following, token)
        for forced in after.forced:
            tokens.append(self._appended(sequence, Choice(forced)))
            if (reason := self._reason(sequence, forced)) is not None:
                return reason, None
        if after.is_complete:
            return FinishReason.STOP, None
        if after.forced or not sequence.grammar.has_begun:
            return None, None
        return None, following.after(token)

    def _chosen(self, sequence: Sequence, output: StepOutput, sample: int, following: Following | None) -> Choice:
        row, token = output.logits[sample], output.tokens[sample]
        if (failed := output.failed.get(sample)) is not None:
            raise failed
        if token is None:
            self._scheduler.forget(sequence)  # any block, also one found in the cache, may hold the fault
            raise InternalError("the model returned logits that are not finite")
        if row is None:
            if following is not None and following.forced and sequence.sampling.logprobs is None:
                return Choice(following.forced[0])
            found = output.logprobs.get(sample)
            return Choice(token) if found is None else Choice(token, found.logprob, found.top)
        if following is not None and following.forced:
            return scored_choice(row, following.forced[0], sequence.sampling)
        length = len(sequence.tokens)
        history = sequence.history(length) if sequence.sampling.changes_logits else None
        return choose(row, sequence.sampling, length, history, token, None if following is None else following.allowed)

    def _appended(self, sequence: Sequence, choice: Choice) -> TokenOut:
        first = sequence.generated == 0
        sequence.tokens.append(choice.token_id)
        return TokenOut(
            request_id=sequence.request_id,
            token_id=choice.token_id,
            logprob=choice.logprob,
            top=choice.top,
            cached_tokens=sequence.cached_tokens if first else None,
        )

    def _reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._is_last(sequence, len(sequence.tokens)) else None

    def _is_last(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence ends with `tokens` tokens, whatever they are."""
        generated = tokens - sequence.prompt_tokens
        return tokens >= self._scheduler.max_model_tokens or generated >= sequence.sampling.max_tokens

    def idle_tick(self) -> None:
        """Sends a heartbeat to waiting followers. Call it about once a second."""
        if self._send_to_followers is not None:
            self._send_to_followers(HEARTBEAT)

    def close(self) -> None:
        """Tells the followers to stop."""
        if self._grammars is not None:
            self._grammars.close()
        if self._send_to_followers is not None:
            try:
                self._send_to_followers(STOP)
            except WorkerLost:
                pass  # they have stopped already

    def report_layers(self, after_layer: Callable[[], None]) -> None:
        """Calls `after_layer` during each step, so that a long one shows that it computes."""
        self._runner.after_layer = after_layer

    # --- state ------------------------------------------------------------------------------------------------

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
        """Number of preemptions since the start."""
        return self._scheduler.preemptions

    def take_cache_events(self) -> list[CacheEvent]:
        return self._scheduler.pool.take_events()


def _out_of_memory(error: Exception) -> WorkerLost:
    return WorkerLost(f"a step ran out of memory: {str(error).splitlines()[0]}")


def _prompt_scores(flight: Flight, output: StepOutput) -> list[PromptScores]:
    both = zip(flight.plan.chunks, flight.step.sequences, strict=True)
    scored = [chunk.sequence for chunk, inputs in both if inputs.scored]
    scores: list[PromptScores] = []
    for sequence, tokens in zip(scored, output.scores, strict=True):
        scores.append(PromptScores(sequence.request_id, sequence.scored_tokens, tokens))
        sequence.scored_tokens += len(tokens)
    return scores


def _work(plan: StepPlan, accepted: Mapping[Sequence, int]) -> StepWork:
    work = StepWork()
    for chunk in plan.chunks:
        decodes = chunk.start >= chunk.sequence.prompt_tokens
        work = work.with_chunk(
            chunk.start,
            chunk.computed_tokens,
            decodes=decodes,
            samples=chunk.sampled_tokens,
            proposed=len(chunk.proposed),
            accepted=accepted.get(chunk.sequence, 0),
        )
    return work


def _first_samples(plan: StepPlan) -> Iterator[tuple[Chunk, int]]:
    """Each chunk that samples, and the number of its first sample in the step's output."""
    sample = 0
    for chunk in plan.chunks:
        if chunk.samples:
            yield chunk, sample
            sample += chunk.sampled_tokens
