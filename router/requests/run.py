"""One request on its way through the workers: a state machine driven by what they say. Nothing in it waits.

    queued ── Reserve → D ── Reserved ── Prefill → P ── first token ── Join → D ── tokens ── end
           └─ Generate → D (local prefill) ─────────── first token ──────────────── tokens ── end

A handoff that fails or a worker that is lost leads back to queued, at any point: prompt and answer so far are the next
attempt's prompt, and as noise depends on a token's position alone, the answer goes on as if nothing had happened.

Every way out cancels the request on each worker that may still know it, and ends in exactly one end state.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.causes import HandoffFault
from router.observe.paces import PaceMeter
from router.observe.trace import Trace
from router.policies.types import WaitReason
from router.requests import frames
from router.requests.attempt_faults import BLAMED, HANDOFF_FAULTS, REFUSALS, RETRIED
from router.requests.deadlines import DEADLINE_SLACK_S
from router.requests.move import Move, Mover
from router.requests.output import OutputAssembler, ResponseStream, Usage
from router.requests.request import ValidRequest
from router.requests.run_account import RunAccount
from router.requests.run_host import RunHost
from router.requests.wire_names import WireNames
from router.terms import Terms
from router.workers.fleet import Worker
from router.workers.link import WorkerLink
from tandem.clock import Clock
from tandem.errors import DeadlineExceeded, InternalError, RequestCancelled, TandemError, WorkerLost
from tandem.request import FinishReason, Lifecycle, RequestState
from tandem.v1 import inference_pb2, worker_pb2
from worker.wire import FINISH_REASONS, parse_error

GAPS_AT_ONCE = 8  # that many tokens late the metrics may be
_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}


class RequestRun:
    def __init__(
        self, request: ValidRequest, output: OutputAssembler, terms: Terms, clock: Clock, host: RunHost, migrations: int
    ) -> None:
        """`migrations`: how many there may be."""
        self.request = request
        self.terms = terms
        self.lifecycle = Lifecycle()
        self.stream = ResponseStream(request.request_id, self.cancel)
        self.excluded: frozenset[str] = frozenset()
        self.waiting_since_s = clock.now_s()
        self.trace = Trace.of(request, terms, self.waiting_since_s)
        self.decode: Worker | None = None
        self.prefill: Worker | None = None  # None: local prefill
        self.waiting_for: WaitReason | None = None
        self.credited_tokens = 0  # what the prefix index said whoever prefills has cached
        self.tokens_ahead = 0  # prompt tokens that whoever prefills had to compute before it
        self._attempts = 0
        self._migrations = 0
        self._max_migrations = migrations
        self._answer: list[int] = []  # the tokens given out
        self._prompt_scores: list[inference_pb2.TokenLogprobs] = []  # of the current attempt
        self._resumed_at = 0  # so many of them before the current attempt
        self._assembler = output
        self._clock = clock
        self._host = host
        self._meter = PaceMeter()
        self._gaps: list[float] = []  # seconds between tokens, not told yet
        self._wire_id = ""
        self._names = WireNames()
        self._asked: worker_pb2.Work | None = None  # of the decode worker; the prefill worker is asked for the same
        self._mover = Mover(self._names, host)
        self._account = RunAccount.open(self.waiting_since_s)

    @property
    def received_s(self) -> float:
        return self._account.received_s

    @property
    def answer(self) -> Sequence[int]:
        """The tokens given out."""
        return self._answer

    @property
    def answer_tokens(self) -> int:
        return len(self._answer)

    @property
    def prefill_tokens(self) -> int:
        """What the next attempt has to prefill: the prompt, and the answer so far."""
        return self.request.prompt_tokens + len(self._answer)

    @property
    def cached_tokens(self) -> int:
        """At the answer's first token: what whoever prefilled had cached."""
        return self._account.cached_decode if self.prefill is None else self._account.cached_prefill

    @property
    def wrong_credit_tokens(self) -> int:
        """At the answer's first token: credited tokens that had to be computed after all. The last block of a prompt
        is never asked of a cache, for its last token is computed in any case."""
        block_tokens = self.request.block_tokens
        most = (self.request.prompt_tokens - 1) // block_tokens * block_tokens
        return max(0, min(self.credited_tokens, most) - self.cached_tokens)

    # ---- on its way

    def start(self, decode: Worker, prefill: Worker | None) -> None:
        """QUEUED: goes to the workers. A wire id of its own keeps words about an earlier attempt apart."""
        self._attempts += 1
        self._wire_id = f"{self.request.request_id}.{self._attempts}"
        self.decode, self.prefill = decode, prefill
        self._resumed_at = len(self._answer)
        self._meter.reset()
        if not self._answer:
            self._account.dispatched_s = self._clock.now_s()
            self._prompt_scores.clear()
        if prefill is None:
            self.trace.begin(self._wire_id, "", decode.key.worker_id, self._clock.now_s())
            self.lifecycle.start_prefill()
            self._names.attach(decode, self._wire_id, self)
            frames.generate(decode, self._work())
            self._host.sent(self, decode)
        else:
            self._reserve(decode, prefill)

    def try_next(self, decode: Worker) -> None:
        """QUEUED, refused by a decode worker: asks another, with the same prefill worker."""
        if self.prefill is None:
            raise InternalError("only a request that is handed off is refused before its prefill")
        self.decode = decode
        self._reserve(decode, self.prefill)

    def _reserve(self, decode: Worker, prefill: Worker) -> None:
        self.trace.begin(self._wire_id, prefill.key.worker_id, decode.key.worker_id, self._clock.now_s())
        self._names.attach(decode, self._wire_id, self)
        self._asked = self._work()
        frames.reserve(decode, self._asked, prefill)
        self._host.sent(self, decode)

    def _work(self) -> worker_pb2.Work:
        """Of the current attempt: the prompt and the answer so far."""
        return self.request.work(self._wire_id, self._answer, self.trace.trace_id)

    def move_to(self, target: Worker) -> bool:
        """Goes on on `target` as soon as its KV is there. False: it does not decode, or is on its way already."""
        source = self.decode
        if source is None or not self._answer or self.lifecycle.state is not RequestState.DECODING:
            return False
        if self._mover.is_moving:
            return False
        self._attempts += 1
        target_id = f"{self.request.request_id}.{self._attempts}"
        self._mover.begin(Move(self, source, target, self._wire_id, target_id))
        return True

    # ---- what workers say

    def on_held(self, link: WorkerLink, held: worker_pb2.Held) -> None:
        self._mover.on_held(link, held)

    def on_reserved(self, link: WorkerLink, reserved: worker_pb2.Reserved) -> None:
        if self._mover.is_moving:
            self._mover.on_reserved(link, reserved)
            return
        prefill = self.prefill
        if prefill is None or self.lifecycle.state is not RequestState.QUEUED:
            return
        attempt = self.trace.attempts[-1]
        attempt.reserved_s = attempt.prefill_sent_s = self._clock.now_s()
        if not prefill.link.ready:
            lost = prefill.key.worker_id
            self._fail_or_retry(WorkerLost(f"worker {lost} was lost; a retry may succeed"), lost)
            return
        if not self._answer:
            self._account.cached_decode = reserved.ticket.cached_tokens
        self.lifecycle.start_prefill()
        self._names.attach(prefill, self._wire_id, self)
        frames.prefill(prefill, self._asked or self._work(), reserved.ticket)
        self._asked = None
        self._host.sent(self, prefill)

    def on_handoff(self, link: WorkerLink, done: worker_pb2.HandoffDone, age_s: float) -> None:
        if (move := self._mover.on_handoff(link)) is not None:
            self.decode, self._wire_id = move.target, move.target_id
            self._account.moved(done)
            self._meter.reset()
            self._host.moved(self, move.source)
            return
        if (attempt := self.trace.report(done, self._clock.now_s() - age_s)) is not None:
            self._host.handed_off(self, attempt, done)
        if self._is_decode(link):
            self._account.moved(done)
            self._joined()
            if attempt is not None and (told_s := attempt.joined_at_s()) is not None:
                first = attempt.joined_s == self._account.joined_s
                attempt.joined_s = max(told_s, attempt.first_token_s or told_s)
                if first:
                    self._account.joined_s = attempt.joined_s
        elif self._has_first_token:
            self._names.detach(link)  # the prefill worker's side is over

    def on_prompt_scores(self, link: WorkerLink, scores: worker_pb2.PromptScores) -> None:
        """They come before the answer's first token; a continuation does not ask for them."""
        if not self._answer:
            self._prompt_scores += scores.tokens

    def on_token(self, link: WorkerLink, token: worker_pb2.StepToken) -> None:
        if not self._answer and not self._take_prompt_scores():
            worker = link.key.worker_id
            self._fail_or_retry(InternalError(f"worker {worker} left out logprobs of the prompt"))
            return
        account, now_s = self._account, self._clock.now_s()
        if self._answer:
            self._gaps.append(now_s - account.last_token_s)
            if len(self._gaps) == GAPS_AT_ONCE:
                self._tell_gaps()
        account.last_token_s = now_s
        decodes = self.lifecycle.state is RequestState.DECODING
        if not decodes:
            self._before_decoding(link, token, now_s)
        elif (seconds := self._meter.token(now_s)) is not None:
            self._host.paced(self, seconds)
        token_id = token.token_id
        self._answer.append(token_id)
        if not self.stream.put(self._assembler.push(token)):
            self._end_cancelled(RequestCancelled("the client left too much of the answer unread"))
        elif self._assembler.stopped:
            self._finish(FinishReason.STOP)
        elif not decodes and self.lifecycle.state is RequestState.PREFILLING:
            self._after_first_token(token_id)

    def _before_decoding(self, link: WorkerLink, token: worker_pb2.StepToken, now_s: float) -> None:
        """A token of an attempt that is not known to decode: its first, or the one that shows that it joined."""
        if not self._has_first_token:
            self._on_first_token(token, now_s)
        elif self.lifecycle.state is RequestState.HANDOFF and self._is_decode(link):
            self._joined()
            self._meter.token(now_s)

    def on_ended(self, link: WorkerLink, ended: worker_pb2.Ended) -> None:
        self._names.detach(link)
        if self._mover.on_target_gone(link):
            return
        if ended.HasField("error"):
            self._on_worker_error(link, ended.error)
        elif ended.finish_reason in _REASONS and self._has_first_token:
            self._finish(_REASONS[ended.finish_reason])
        elif self._is_decode(link):
            self._fail_or_retry(InternalError(f"worker {link.key.worker_id} ended the request without a reason"))
        # else: the prefill worker's side is over

    def on_lost(self, link: WorkerLink, error: WorkerLost) -> None:
        self._names.detach(link)
        if self._mover.on_target_gone(link):
            return
        if self._is_decode(link) or self.lifecycle.state is not RequestState.DECODING:
            self._fail_or_retry(error, link.key.worker_id)

    def _take_prompt_scores(self) -> bool:
        """Gives the prompt's logprobs to the client, if it wants any. False when they are not its tokens'."""
        if self.request.sampling.prompt_logprobs is None:
            return True
        self.stream.prompt_scores = tuple(self._prompt_scores)
        return [each.token_id for each in self._prompt_scores] == [*self.request.prompt[1:]]

    @property
    def _has_first_token(self) -> bool:
        """Of the current attempt."""
        return len(self._answer) > self._resumed_at

    def _on_first_token(self, token: worker_pb2.StepToken, now_s: float) -> None:
        attempt, prefiller = self.trace.attempts[-1], self.prefill or self.decode
        attempt.first_token_s = now_s
        if prefiller is not None and token.HasField("computing_at_s"):
            attempt.computing_s = prefiller.link.local_s(token.computing_at_s)
            attempt.sampled_s = prefiller.link.local_s(token.sampled_at_s)
        if not self._answer:
            self._account.first_token(token, self.prefill, now_s)
        self._host.prefilled(self)

    def _after_first_token(self, token_id: int) -> None:
        if self.prefill is None:
            self._start_decode()  # the engine says when it ends
        elif (reason := self._whole_by()) is not None:
            self._finish(reason)
        elif self.decode is not None:
            self.lifecycle.start_handoff()
            frames.join(self.decode, self._wire_id, token_id)

    def _joined(self) -> None:
        if self.lifecycle.state is RequestState.HANDOFF:
            self.trace.attempts[-1].joined_s = self._clock.now_s()
            self._start_decode()

    def _start_decode(self) -> None:
        self._account.joined(self._clock.now_s())
        self.lifecycle.start_decode()

    def _whole_by(self) -> FinishReason | None:
        """Why the answer is whole, if the last token given out ended it."""
        sampling = self.request.sampling
        if self._answer and self._answer[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._answer) >= sampling.max_tokens else None

    def _on_worker_error(self, link: WorkerLink, error: worker_pb2.WorkerError) -> None:
        typed = parse_error(error)
        refused = typed.code in REFUSALS and self.lifecycle.state is RequestState.QUEUED
        if refused and self._is_decode(link):
            self.excluded |= {link.key.worker_id}
            self.trace.failed(typed, self._clock.now_s())
            self._host.refused(self, typed)
        elif not self._is_decode(link) and self.lifecycle.state is RequestState.DECODING:
            pass  # verified and joined: what the prefill worker says no longer matters
        elif typed.code in HANDOFF_FAULTS:  # either side may be at fault
            if isinstance(typed, HandoffFault):
                self._host.handoff_failed(self, typed)
            self._fail_or_retry(typed, *(each.key.worker_id for each in (self.decode, self.prefill) if each))
        else:
            self._fail_or_retry(typed, link.key.worker_id)

    # ---- ends

    def cancel(self) -> None:
        """The client went away, perhaps because its deadline passed: it may know of that before we do."""
        if (at_s := self.terms.deadline_s) is not None and self._clock.now_s() >= at_s - DEADLINE_SLACK_S:
            self.expire()
        elif not self.lifecycle.state.is_end:
            self._end_cancelled(RequestCancelled("cancelled by the client"))

    def step_back(self, cause: TandemError) -> None:
        """Gives its place on the workers to others and waits again, unless it has its first token."""
        if self._names and self.lifecycle.state in (RequestState.QUEUED, RequestState.PREFILLING):
            self._fail_or_retry(cause)

    def expire(self) -> None:
        """The client's deadline passed."""
        if not self.lifecycle.state.is_end:
            self.reject(DeadlineExceeded(f"its deadline passed after {len(self._answer)} tokens of the answer"))

    def reject(self, error: TandemError) -> None:
        """Ended by the router: refused, or, if it is on its way or has a part of its answer, failed."""
        if self._answer or self.lifecycle.state not in (RequestState.ADMITTED, RequestState.QUEUED):
            self.lifecycle.fail()
        else:
            self.lifecycle.reject()
        self._end(error)

    def leave_workers(self) -> None:
        """Takes the current attempt off its workers."""
        self._mover.forget()
        self._names.leave(self.prefill if self._account.joined_s is not None else None)

    def _finish(self, reason: FinishReason) -> None:
        last = None if self._assembler.stopped else self._assembler.flush()
        if last is not None:
            self.stream.put(last)
        self.lifecycle.finish()
        reason = FinishReason.STOP if self._assembler.stopped else reason
        self._tell_gaps()
        self.stream.finish(self._account.final(reason, self._usage(), self.decode, self._clock.now_s()))
        self._end_trace(None)
        self.leave_workers()
        self._host.ended(self, None)

    def _end_cancelled(self, error: RequestCancelled) -> None:
        self.lifecycle.cancel()
        self._end(error)

    def _fail_or_retry(self, error: TandemError, *failed: str) -> None:
        """The attempt is over; the next one prefers others to the workers that `failed`, if there are any."""
        state = self.lifecycle.state
        if state.is_end:
            return
        self.trace.failed(error, self._clock.now_s())
        if failed and error.code in BLAMED:
            self._host.blamed(self, failed)
        if (reason := self._whole_by()) is not None:
            self._finish(reason)
            return
        # No room to start is no fault: such a request may try as long as it may wait.
        no_room = error.code in REFUSALS and state in (RequestState.QUEUED, RequestState.PREFILLING)
        if no_room or (error.code in RETRIED and self._migrations < self._max_migrations):
            self._migrations += not no_room
            self.excluded |= set(failed)
            self.leave_workers()
            if state is not RequestState.QUEUED:
                self.lifecycle.migrate()
                self.lifecycle.enqueue()
                if not no_room:
                    self.waiting_since_s = self._clock.now_s()  # it had its turn: this is another wait
            self._host.requeue(self, error, refused=no_room)
            return
        self.lifecycle.fail()
        self._end(error)

    def _end(self, error: TandemError) -> None:
        self._tell_gaps()
        self.stream.fail(error)
        self.trace.failed(error, self._clock.now_s())
        self._end_trace(error)
        self.leave_workers()
        self._host.ended(self, error)

    def _tell_gaps(self) -> None:
        if self._gaps:
            self._host.gaps(self, self._gaps, self._account.last_token_s)
            self._gaps = []

    def _end_trace(self, error: TandemError | None) -> None:
        self.trace.cached_tokens_prefill = self._account.cached_prefill
        self.trace.cached_tokens_decode = self._account.cached_decode
        self.trace.end(self.lifecycle.state, None if error is None else error.code, self._usage(), self._clock.now_s())

    def _is_decode(self, link: WorkerLink) -> bool:
        return self.decode is not None and self.decode.link is link

    def _usage(self) -> Usage:
        return self._account.usage(self.request.prompt_tokens, self._assembler.tokens)
