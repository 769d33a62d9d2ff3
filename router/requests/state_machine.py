"""One request on its way through the workers: a pure state machine. Events go in, actions come out.

    queued ── Reserve → D ── Reserved ── Prefill → P ── first token ── Join → D ── tokens ── end
           └─ Generate → D (local prefill) ─────────── first token ──────────────── tokens ── end

A handoff that fails or a worker that is lost leads back to queued, at any point. The prompt and the answer so far are
then the next attempt's prompt. Sampling noise depends on a token's position alone, so the answer stays the same.

Every way out takes the request off each worker that may still have it, and ends in exactly one end state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvtransfer.causes import HandoffFault
from router.policies.types import WaitReason
from router.prefix_index.mirror import WorkerKey
from router.request_terms import RequestTerms
from router.requests import actions as act
from router.requests import events as ev
from router.requests.deaths import Deaths
from router.requests.move import Move
from router.requests.output import TextPiece
from router.requests.protocols import Assembler, Request
from router.requests.retries import BLAMED, HANDOFF_FAULTS, REFUSALS, Retry, retry_of
from router.requests.timeline import AttemptTimes, RunTimeline
from tandem.errors import DeadlineExceeded, ErrorCode, InternalError, RequestCancelled, TandemError
from tandem.request import FinishReason, Lifecycle, RequestState
from tandem.text.words import plural

GAPS_AT_ONCE = 16  # tokens between two TokenGaps facts
DEADLINE_SLACK_S = 0.05  # a client that leaves this shortly before its deadline left because of it

_UNSTARTED = (RequestState.RECEIVED, RequestState.ADMITTED, RequestState.QUEUED)


class RequestRun:
    """Reads `decode` and `prefill` (None: local prefill) as the workers of the current attempt."""

    def __init__(
        self, request: Request, assembler: Assembler, terms: RequestTerms, now_s: float, max_migrations: int
    ) -> None:
        self.request = request
        self.terms = terms
        self.lifecycle = Lifecycle()
        self.excluded: frozenset[str] = frozenset()  # workers the next attempt avoids if there are others
        self.waiting_since_s = now_s
        self.waiting_for: WaitReason | None = None
        self.deaths = Deaths()
        self.decode: WorkerKey | None = None
        self.prefill: WorkerKey | None = None
        self.credited_tokens = 0
        self.tokens_ahead = 0
        self.is_performing = False  # its actions are being carried out, further up the stack
        self._actions: deque[act.Action] = deque()
        self._assembler = assembler
        self._attempts = 0
        self._migrations = 0
        self.max_migrations = max_migrations
        self._answer: list[int] = []  # the tokens given out
        self._resumed_at = 0  # so many of them before the current attempt
        self._prompt_scores: list[ev.PromptToken] = []  # of the current attempt
        self._gaps: list[float] = []  # seconds between tokens, not yet in a fact
        self._is_paced = False  # the last token came from the decode batch, and so will the next
        self._wire_id = ""
        self._on: list[tuple[WorkerKey, str]] = []  # workers that may have it, with its wire id there
        self._move: Move | None = None
        self._timeline = RunTimeline.open(now_s)
        self._attempt_times = AttemptTimes(now_s)
        self._now_s = now_s  # of the event being handled

    @property
    def received_s(self) -> float:
        return self._timeline.received_s

    @property
    def answer_times_s(self) -> tuple[float, float] | None:
        """When the answer's first and its last token so far came; None: it has none."""
        return (self._timeline.first_token_s, self._timeline.last_token_s) if self._answer else None

    @property
    def now_s(self) -> float:
        """When the event happened that it handled last."""
        return self._now_s

    @property
    def state(self) -> RequestState:
        return self.lifecycle.state

    @property
    def answer(self) -> Sequence[int]:
        """The tokens given out."""
        return self._answer

    @property
    def answer_tokens(self) -> int:
        return len(self._answer)

    @property
    def prefill_tokens(self) -> int:
        """What the next attempt has to prefill: the prompt and the answer so far."""
        return self.request.prompt_tokens + len(self._answer)

    @property
    def attempts(self) -> int:
        """Wire ids used so far."""
        return self._attempts

    @property
    def actions(self) -> deque[act.Action]:
        """Those that were not carried out yet, in order."""
        return self._actions

    @property
    def stopped(self) -> bool:
        """A stop string is complete."""
        return self._assembler.stopped

    @property
    def stop_string(self) -> str | None:
        """That is complete. No action has it: recordings without text may not."""
        return self._assembler.stop_string

    @property
    def cached_tokens(self) -> int:
        """At the answer's first token: what the worker that prefilled had cached."""
        return self._timeline.cached_decode if self.prefill is None else self._timeline.cached_prefill

    @property
    def wrong_credit_tokens(self) -> int:
        """At the answer's first token: credited tokens that had to be computed after all. The last block of a prompt
        does not count: its last token is computed in any case."""
        block_tokens = self.request.block_tokens
        most = (self.request.prompt_tokens - 1) // block_tokens * block_tokens
        return max(0, min(self.credited_tokens, most) - self.cached_tokens)

    # ---- in

    def on(self, event: ev.Event, now_s: float) -> deque[act.Action]:
        """Takes an event of `now_s` (monotonic seconds). Returns the queue of actions not carried out yet; the caller
        takes them from its left."""
        self._now_s = now_s
        _HANDLERS[type(event)](self, event)
        return self._actions

    def carry_out(self, perform: Callable[[RequestRun, act.Action], None]) -> None:
        """Gives `perform` each action, in order. What carrying one out leads to comes after those that were there."""
        if self.is_performing:
            return
        self.is_performing = True
        try:
            while self._actions:
                perform(self, self._actions.popleft())
        finally:
            self.is_performing = False

    def on_token(self, worker: WorkerKey, token: ev.Token, now_s: float) -> TextPiece | None:
        """As `on(TokenSampled(worker, token))`, for the hot path. Returns the piece if there is nothing else to do,
        as nearly always; None: see `actions`."""
        self._now_s = now_s
        answer, timeline = self._answer, self._timeline
        decodes = self._is_paced or self.lifecycle.state is RequestState.DECODING
        if not decodes and self.lifecycle.state in _UNSTARTED:
            self._fail_or_retry(InternalError(f"worker {worker.worker_id} sent a token before its turn"), worker)
            return None
        if answer:
            gaps = self._gaps
            gaps.append(now_s - timeline.last_token_s)
            timeline.last_token_s = now_s
            if len(gaps) == GAPS_AT_ONCE or not self._is_paced:
                self._flush_gaps()
        elif not self._emit_prompt_scores():
            self._fail_or_retry(InternalError(f"worker {worker.worker_id} left out logprobs of the prompt"))
            return None
        else:
            timeline.last_token_s = now_s
        if not decodes:
            self._before_decoding(worker, token)
        if token.proposed_tokens:
            timeline.proposals.add(token, len(answer))
        answer.append(token.token_id)
        piece = self._assembler.push(token)
        if decodes and not self._actions and not self._assembler.stopped:
            return piece
        self._actions.append(piece)
        if self._assembler.stopped:
            self._finish(FinishReason.STOP)
        elif not decodes and self.lifecycle.state is RequestState.PREFILLING:
            self._after_first_token(token.token_id)
        return None

    def _on_submitted(self, event: ev.Submitted) -> None:
        self.lifecycle.admit()

    def _on_queued(self, event: ev.Queued) -> None:
        self.lifecycle.enqueue()

    # ---- on its way

    def _on_started(self, event: ev.Started) -> None:
        """A wire id of its own keeps messages about an earlier attempt apart."""
        self.credited_tokens, self.tokens_ahead = event.credited_tokens, event.tokens_ahead
        self._wire_id = self._next_wire_id()
        self.decode, self.prefill = event.decode, event.prefill
        self._resumed_at = len(self._answer)
        self._attempt_times = AttemptTimes(self._now_s)
        self._is_paced = False
        if not self._answer:
            self._timeline.dispatched_s = self._now_s
            self._prompt_scores.clear()
        if event.prefill is not None:
            self._reserve(event.decode, event.prefill)
            return
        self._begin_attempt(event.decode, None)
        self.lifecycle.start_prefill()
        self._open(act.Generate(event.decode, self._wire_id))

    def _on_rerouted(self, event: ev.Rerouted) -> None:
        if self.prefill is None:
            raise InternalError("only a request that is handed off is refused before its prefill")
        self.decode = event.decode
        self._reserve(event.decode, self.prefill)

    def _reserve(self, decode: WorkerKey, prefill: WorkerKey) -> None:
        self._begin_attempt(decode, prefill)
        self._open(act.Reserve(decode, self._wire_id, prefill, len(self._answer)))

    def _begin_attempt(self, decode: WorkerKey, prefill: WorkerKey | None) -> None:
        self._attempt_times.dispatched_s = self._now_s
        self._actions.append(act.AttemptStarted(self._wire_id, decode, prefill))

    def _on_reserved(self, event: ev.Reserved) -> None:
        if (move := self._move) is not None:
            self._actions += move.push(event, self._answer[-1])
            return
        if self.prefill is None or self.lifecycle.state is not RequestState.QUEUED:
            return
        if not self._answer:
            self._timeline.cached_decode = event.cached_tokens
        self.lifecycle.start_prefill()
        self._attempt_times.prefill_sent_s = self._now_s
        self._actions.append(act.PrefillSent())
        self._open(act.Prefill(self.prefill, self._wire_id, event.ticket))

    def _on_prompt_scored(self, event: ev.PromptScored) -> None:
        """A continuation does not ask for them."""
        if not self._answer:
            self._prompt_scores += event.tokens

    def _emit_prompt_scores(self) -> bool:
        """Before the first token, if the client wants them. False when they are not those of its tokens."""
        if self.request.sampling.prompt_logprobs is None:
            return True
        self._actions.append(act.EmitPromptScores(tuple(self._prompt_scores)))
        return [each.token_id for each in self._prompt_scores] == [*self.request.prompt[1:]]

    def _on_token_sampled(self, event: ev.TokenSampled) -> None:
        if (piece := self.on_token(event.worker, event.token, self._now_s)) is not None:
            self._actions.append(piece)

    def _on_tokens_sampled(self, event: ev.TokensSampled) -> None:
        if self.lifecycle.state is RequestState.HANDOFF and event.worker == self.decode:
            self._joined(self._now_s)
        self._answer.extend(event.token_ids)
        self._timeline.last_token_s = self._now_s

    def _before_decoding(self, worker: WorkerKey, token: ev.Token) -> None:
        """A token of an attempt that is not known to decode: its first, or the one that shows that it joined."""
        if not self._has_first_token:
            self._on_first_token(token)
        elif self.lifecycle.state is RequestState.HANDOFF and worker == self.decode:
            self._joined(self._now_s)
            self._is_paced = True

    def _on_first_token(self, token: ev.Token) -> None:
        self._attempt_times.first_token_s = self._now_s
        of_answer = not self._answer
        if of_answer:
            self._timeline.first_token(token.cached_tokens, self.prefill, self._now_s)
        times, reserve_s = self._attempt_times, None
        worker, sent_s = self.prefill or self.decode, times.dispatched_s
        if times.prefill_sent_s is not None:
            sent_s, reserve_s = times.prefill_sent_s, times.prefill_sent_s - sent_s
        if worker is not None:
            self._actions.append(act.FirstToken(worker, token, of_answer, sent_s, reserve_s))

    def _after_first_token(self, token_id: int) -> None:
        if self.prefill is None:
            self._timeline.joined(self._now_s)
            self.lifecycle.start_decode()  # the engine reports its end
        elif (reason := self._whole_by()) is not None:
            self._finish(reason)
        elif self.decode is not None:
            self.lifecycle.start_handoff()
            self._actions.append(act.Join(self.decode, self._wire_id, token_id))

    def _on_handoff_reported(self, event: ev.HandoffReported) -> None:
        if (move := self._move) is not None and event.worker == move.target:
            self._end_move(move, event)
            return
        is_decode = event.worker == self.decode
        times = self._attempt_times
        sent_s = times.dispatched_s if is_decode else times.prefill_sent_s or times.dispatched_s
        anchor_s, joined_s, exposed_s = max(self._now_s - event.age_s, sent_s), None, None
        if is_decode and event.joined_after_s is not None and event.wire_id == self._wire_id:
            # The report says when it joined: the frame that carries it is a step late.
            first_s = times.first_token_s
            joined_s = anchor_s + event.joined_after_s
            if first_s is not None:
                joined_s = max(joined_s, first_s)
                exposed_s = joined_s - first_s
        self._actions.append(act.HandoffSeen(event.wire_id, anchor_s, event.moved_blocks, exposed_s, event.report))
        if is_decode:
            if move is None:  # else it is the source's side of what the target counts
                self._timeline.moved(event)
            self._joined(self._now_s if joined_s is None else joined_s, corrects=joined_s is not None)
        elif self._has_first_token and (event.worker, event.wire_id) in self._on:
            self._leave(event.worker, cancel=False)  # the prefill worker's side is over

    def _joined(self, at_s: float, *, corrects: bool = False) -> None:
        """`corrects`: `at_s` is better than the time that a token before it showed."""
        if self.lifecycle.state is RequestState.HANDOFF:
            self._timeline.joined(at_s)
            self.lifecycle.start_decode()
        elif corrects and self._attempt_times.joined_s is not None:
            if self._timeline.joined_s == self._attempt_times.joined_s:
                self._timeline.joined_s = at_s
        else:
            return
        self._attempt_times.joined_s = at_s
        self._actions.append(act.Joined(at_s))

    # ---- moves

    def _on_move_started(self, event: ev.MoveStarted) -> None:
        """Goes on at the target as soon as its KV is there. Nothing happens unless it decodes and does not move."""
        if not self.can_move or self.decode is None:
            return
        self._move = Move(self.decode, event.target, self._wire_id, self._next_wire_id())
        self._actions.append(self._move.hold())

    @property
    def can_move(self) -> bool:
        decodes = self.decode is not None and bool(self._answer) and self.lifecycle.state is RequestState.DECODING
        return decodes and self._move is None

    def _on_hold_answered(self, event: ev.HoldAnswered) -> None:
        move = self._move
        if move is None or event.worker != move.source:
            return
        if not event.held:
            self._give_up_move(move)
        elif (reserve := move.reserve(len(self._answer))) is not None:
            self._flush_gaps()
            self._is_paced = False  # the next gap holds the move
            self._open(reserve)

    def _end_move(self, move: Move, event: ev.HandoffReported) -> None:
        self._move = None
        self._leave(move.source, cancel=False)
        self.decode, self._wire_id = move.target, move.target_id
        self._timeline.moved(event)
        self._is_paced = False
        self._actions.append(act.Moved(move.source))

    def _ends_move(self, worker: WorkerKey) -> bool:
        """Whether `worker` is a move's target that refused, failed or was lost: the request goes on where it was."""
        move = self._move
        if move is None or worker != move.target:
            return False
        self._actions.append(move.resume())
        self._give_up_move(move)
        return True

    def _give_up_move(self, move: Move) -> None:
        self._move = None
        self.excluded |= {move.target.worker_id}
        self._leave(move.target, cancel=True)
        self._actions.append(act.MoveFailed(move.target))

    # ---- what ends an attempt

    def _on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        worker = event.worker
        self._forget(worker)
        if self._ends_move(worker):
            return
        if event.error is not None:
            self._on_worker_error(worker, event.error)
        elif event.reason is not None and self._has_first_token:
            self._finish(event.reason)
        elif worker == self.decode:
            self._fail_or_retry(InternalError(f"worker {worker.worker_id} ended the request without a reason"))
        # else: the prefill worker's side is over

    def _on_worker_gone(self, event: ev.WorkerGone) -> None:
        self._forget(event.worker)
        if self._ends_move(event.worker):
            return
        if event.worker == self.decode or self.lifecycle.state is not RequestState.DECODING:
            self._fail_or_retry(event.error, event.worker)

    def _on_worker_stalled(self, event: ev.WorkerStalled) -> None:
        if event.worker in self._computing():
            self.deaths.stalled(event.worker)
        self._on_worker_gone(ev.WorkerGone(event.worker, event.error))

    def _on_suspect_heard(self, event: ev.SuspectHeard) -> None:
        self.deaths.heard(event.worker)

    def _on_suspect_died(self, event: ev.SuspectDied) -> None:
        if not self.lifecycle.state.is_end:
            self.deaths.suspect_died(event.worker)
            if (error := self.deaths.quarantine) is not None:
                self._reject(error)

    def _on_worker_error(self, worker: WorkerKey, error: TandemError) -> None:
        is_decode = worker == self.decode
        if is_decode and error.code in REFUSALS and self.lifecycle.state is RequestState.QUEUED:
            self.excluded |= {worker.worker_id}
            self._actions.append(act.AttemptFailed(error))
            self._actions.append(act.ChooseDecode(error))
        elif not is_decode and self.lifecycle.state is RequestState.DECODING:
            pass  # verified and joined: an error of the prefill worker no longer matters
        elif error.code in HANDOFF_FAULTS:  # either side may be at fault
            if isinstance(error, HandoffFault):
                self._actions.append(act.HandoffFailed(error))
            self._fail_or_retry(error, *(each for each in (self.decode, self.prefill) if each is not None))
        else:
            self._fail_or_retry(error, worker)

    def _fail_or_retry(self, error: TandemError, *failed: WorkerKey) -> None:
        """The attempt is over. The next one prefers other workers to those that `failed`."""
        state = self.lifecycle.state
        if state.is_end:
            return
        if failed and error.code in BLAMED:
            self._actions.append(act.WorkersBlamed(failed))
        if (reason := self._whole_by()) is not None:
            self._finish(reason)
            return
        if error.code is ErrorCode.WORKER_DIED:
            error = self._suspected(error, failed)
        retry = retry_of(error.code, state, self._migrations, self.max_migrations)
        if retry is Retry.NO:
            self.lifecycle.fail()
            self._end(error)
            return
        self._actions.append(act.AttemptFailed(error))
        no_room = retry is Retry.WHEN_THERE_IS_ROOM
        self._migrations += not no_room
        self.excluded |= {each.worker_id for each in failed}
        self._leave_workers()
        if state is not RequestState.QUEUED:
            self.lifecycle.migrate()
            self.lifecycle.enqueue()
            if not no_room:
                self.waiting_since_s = self._now_s  # it had its turn: this is another wait
        self._actions.append(act.Requeue(error, no_room))

    def _suspected(self, error: TandemError, died: Sequence[WorkerKey]) -> TandemError:
        """The error to go on with: requests in a queue, or that only have blocks reserved, made no worker die, unless
        it was to read their images."""
        computing = self._computing()
        self.deaths.died(each for each in died if each in computing)
        return self.deaths.quarantine or error

    def _computing(self) -> set[WorkerKey | None]:
        return {
            RequestState.QUEUED: {self.decode if self.request.images else None},
            RequestState.PREFILLING: {self.prefill or self.decode},
            RequestState.HANDOFF: {self.prefill, self.decode},
            RequestState.DECODING: {self.decode},
        }.get(self.lifecycle.state, set())

    # ---- ends

    def _on_cancelled(self, event: ev.Cancelled) -> None:
        """The client may notice before the router that its deadline passed."""
        if (at_s := self.terms.deadline_s) is not None and self._now_s >= at_s - DEADLINE_SLACK_S:
            self._on_expired(ev.Expired())
        elif not self.lifecycle.state.is_end:
            self._end_cancelled(RequestCancelled("cancelled by the client"))

    def _on_reader_behind(self, event: ev.ReaderBehind) -> None:
        if not self.lifecycle.state.is_end:
            self._end_cancelled(RequestCancelled("the client left too much of the answer unread"))

    def _on_yielded(self, event: ev.Yielded) -> None:
        if self._on and self.lifecycle.state in (RequestState.QUEUED, RequestState.PREFILLING):
            self._fail_or_retry(event.cause)

    def _on_expired(self, event: ev.Expired) -> None:
        if not self.lifecycle.state.is_end:
            tokens = plural(len(self._answer), "token")
            self._reject(DeadlineExceeded(f"the request's deadline passed after {tokens} of the answer"))

    def _on_rejected(self, event: ev.Rejected) -> None:
        self._reject(event.error)

    def _reject(self, error: TandemError) -> None:
        """Rejected before it was given to a worker, else failed."""
        if self._answer or self.lifecycle.state not in _UNSTARTED:
            self.lifecycle.fail()
        else:
            self.lifecycle.reject()
        self._end(error)

    def _end_cancelled(self, error: RequestCancelled) -> None:
        self.lifecycle.cancel()
        self._end(error)

    def _finish(self, reason: FinishReason) -> None:
        last = None if self._assembler.stopped else self._assembler.flush()
        if last is not None:
            self._actions.append(last)
        self.lifecycle.finish()
        reason = FinishReason.STOP if self._assembler.stopped else reason
        self._flush_gaps()
        self._leave_workers()
        timeline = self._timeline
        usage = timeline.usage(self.request.prompt_tokens, len(self._answer))
        final = timeline.final(reason, usage, self.decode, self._now_s)
        self._actions.append(
            act.End(self.lifecycle.state, usage, timeline.cached_prefill, timeline.cached_decode, final=final)
        )

    def _end(self, error: TandemError) -> None:
        self._flush_gaps()
        self._leave_workers()
        timeline = self._timeline
        usage = timeline.usage(self.request.prompt_tokens, len(self._answer))
        self._actions.append(
            act.End(self.lifecycle.state, usage, timeline.cached_prefill, timeline.cached_decode, error=error)
        )

    def _whole_by(self) -> FinishReason | None:
        """Why the answer is whole, if the last token given out ended it."""
        sampling = self.request.sampling
        if self._answer and self._answer[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._answer) >= sampling.max_tokens else None

    def _flush_gaps(self) -> None:
        if self._gaps:
            self._actions.append(act.TokenGaps(self._gaps, self._timeline.last_token_s, self._is_paced))
            self._gaps = []
        self._is_paced = self.lifecycle.state is RequestState.DECODING

    @property
    def _has_first_token(self) -> bool:
        """Of the current attempt."""
        return len(self._answer) > self._resumed_at

    # ---- workers that have it

    def _next_wire_id(self) -> str:
        self._attempts += 1
        return f"{self.request.request_id}.{self._attempts}"

    def _open(self, frame: act.Opening) -> None:
        self._on.append((frame.worker, frame.wire_id))
        self._actions.append(frame)

    def _forget(self, worker: WorkerKey) -> None:
        """The worker no longer has it."""
        self._on = [each for each in self._on if each[0] != worker]

    def _leave(self, worker: WorkerKey, *, cancel: bool) -> None:
        for each, wire_id in self._on:
            if each == worker:
                self._actions.append(act.Leave(worker, wire_id, cancel))
        self._forget(worker)

    def _leave_workers(self) -> None:
        """All of them. The prefill worker's report on a handoff that is done may still come."""
        self._move = None
        reporting = self.prefill if self._timeline.joined_s is not None else None
        for worker, wire_id in self._on:
            self._actions.append(act.Leave(worker, wire_id, cancel=True, may_report=worker == reporting))
        self._on = []


def _handlers() -> dict[type, Callable[[RequestRun, Any], None]]:
    return {
        ev.Submitted: RequestRun._on_submitted,
        ev.Queued: RequestRun._on_queued,
        ev.Started: RequestRun._on_started,
        ev.Rerouted: RequestRun._on_rerouted,
        ev.MoveStarted: RequestRun._on_move_started,
        ev.Yielded: RequestRun._on_yielded,
        ev.Rejected: RequestRun._on_rejected,
        ev.Cancelled: RequestRun._on_cancelled,
        ev.Expired: RequestRun._on_expired,
        ev.ReaderBehind: RequestRun._on_reader_behind,
        ev.Reserved: RequestRun._on_reserved,
        ev.PromptScored: RequestRun._on_prompt_scored,
        ev.TokenSampled: RequestRun._on_token_sampled,
        ev.TokensSampled: RequestRun._on_tokens_sampled,
        ev.HandoffReported: RequestRun._on_handoff_reported,
        ev.HoldAnswered: RequestRun._on_hold_answered,
        ev.AttemptEnded: RequestRun._on_attempt_ended,
        ev.WorkerGone: RequestRun._on_worker_gone,
        ev.WorkerStalled: RequestRun._on_worker_stalled,
        ev.SuspectHeard: RequestRun._on_suspect_heard,
        ev.SuspectDied: RequestRun._on_suspect_died,
    }


_HANDLERS = _handlers()
