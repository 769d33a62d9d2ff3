"""A run on gRPC links: the workers' messages become events, its frames become the Worker protocol's messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.prefix_index.mirror import WorkerKey
from router.requests import actions as act
from router.requests import events as ev
from router.requests.output import ResponseStream
from router.requests.raw_request import ValidRequest
from router.requests.state_machine import RequestRun
from router.workers.link import WorkerLink
from tandem.errors import TandemError, WorkerLost
from tandem.request import FinishReason
from tandem.v1 import worker_pb2
from worker.wire import FINISH_REASONS, parse_error

_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}


class EventSink(Protocol):
    """Takes what happens to a run: `router.requests.core.RequestCore`, or a canary."""

    def on(self, run: RequestRun, event: ev.Event) -> None: ...

    def perform(self, run: RequestRun, action: act.Action) -> None: ...


class RunOnLinks:
    """One run on the links (a `router.workers.link.RequestSink`). `stream` None: no client reads."""

    __slots__ = ("_core", "_embeds", "_is_recorded", "_link_of", "_request", "_work", "run", "stream")

    def __init__(
        self,
        run: RequestRun,
        request: ValidRequest,
        stream: ResponseStream | None,
        core: EventSink,
        link_of: Callable[[WorkerKey], WorkerLink | None],
        *,
        is_recorded: bool = False,
    ) -> None:
        self.run = run
        self.stream = stream
        self._request = request
        self._core = core
        self._link_of = link_of
        self._is_recorded = is_recorded
        self._embeds = request.sampling.embeds
        self._work: worker_pb2.Work | None = None  # of the decode worker; the prefill worker gets the same

    # ---- out

    def send(self, frame: act.Frame) -> int | None:
        """Queues a frame on its link. Returns its number in the session; None: there is no link."""
        link = self._link_of(frame.worker)
        if link is None:
            return None
        if isinstance(frame, act.Leave):
            self._leave(link, frame)
        else:
            if isinstance(frame, act.Opening):
                sampling = self._request.sampling
                is_new = sampling.grammar is not None or sampling.min_tokens > 0
                if not link.ready or (is_new and not link.takes_grammars):
                    return None
                link.attach(frame.wire_id, self)
            link.send(frame.wire_id, self._message(frame))
        return link.sent_frames

    def _leave(self, link: WorkerLink, frame: act.Leave) -> None:
        if frame.cancel:
            link.cancel(frame.wire_id)
        if frame.may_report:
            link.detach_awaiting_report(frame.wire_id)
        else:
            link.detach(frame.wire_id)

    def _message(self, frame: act.Frame) -> worker_pb2.RouterFrame:
        """A message that is given to the constructor of another is copied; what holds a prompt is filled in place."""
        message = worker_pb2.RouterFrame()
        match frame:
            case act.Generate():
                message.generate.work.CopyFrom(self._new_work(frame.wire_id, self.run.answer_tokens))
            case act.Reserve(sender=sender):
                self._work = self._new_work(frame.wire_id, frame.answer_tokens)
                reserve = message.reserve
                reserve.work.CopyFrom(self._work)
                reserve.prefill_worker, reserve.prefill_epoch = sender
                reserve.use_prefix_cache = True
            case act.Prefill():
                work, self._work = self._work, None
                message.prefill.work.CopyFrom(work or self._new_work(frame.wire_id, self.run.answer_tokens))
                message.prefill.work.ClearField("prediction")
                message.prefill.ticket.CopyFrom(_ticket(frame.ticket))
            case act.Join():
                message.join.request_id, message.join.first_token = frame.wire_id, frame.first_token
            case act.Hold():
                message.hold.request_id = frame.wire_id
            case act.Push():
                self._work = None
                message.move.request_id = frame.wire_id
                message.move.ticket.CopyFrom(_ticket(frame.ticket))
            case act.Resume():
                self._work = None
                message.resume.request_id = frame.wire_id
        return message

    def _new_work(self, wire_id: str, answer_tokens: int) -> worker_pb2.Work:
        trace = self.run.terms.trace
        answer = self.run.answer[:answer_tokens]
        return self._request.work(wire_id, answer, "" if trace is None else trace.trace_id)

    # ---- in: what workers send

    def on_reserved(self, link: WorkerLink, reserved: worker_pb2.Reserved) -> None:
        self._core.on(self.run, ev.Reserved(link.key, reserved.ticket, reserved.ticket.cached_tokens))

    def on_prompt_scores(self, link: WorkerLink, scores: worker_pb2.PromptScores) -> None:
        self._core.on(self.run, ev.PromptScored(link.key, tuple(scores.tokens)))

    def on_token(self, link: WorkerLink, token: worker_pb2.StepToken, now_s: float) -> None:
        run = self.run
        if self._embeds and self.stream is not None:
            self.stream.embedding = token.embedding
        if self._is_recorded or run.is_performing:
            self._core.on(run, ev.TokenSampled(link.key, token))
            return
        piece = run.on_token(link.key, token, now_s)
        if piece is None:
            run.carry_out(self._core.perform)
        elif self.stream is not None and not self.stream.put(piece):
            self._core.on(run, ev.ReaderBehind())

    def on_handoff(self, link: WorkerLink, done: worker_pb2.HandoffDone, age_s: float) -> None:
        joined_s = done.received.joined_s if done.HasField("received") else None
        self._core.on(
            self.run, ev.HandoffReported(link.key, done.request_id, done.bytes, done.blocks, age_s, joined_s, done)
        )

    def on_held(self, link: WorkerLink, held: worker_pb2.Held) -> None:
        self._core.on(self.run, ev.HoldAnswered(link.key, held.held))

    def on_ended(self, link: WorkerLink, ended: worker_pb2.Ended) -> None:
        self._core.on(self.run, ev.AttemptEnded(link.key, _reason(ended), _error(ended)))

    def on_lost(self, link: WorkerLink, error: WorkerLost) -> None:
        self._core.on(self.run, ev.WorkerGone(link.key, error))

    @property
    def stays_when_stalled(self) -> bool:
        return self.run.deaths.is_suspected

    def on_stalled(self, link: WorkerLink, error: WorkerLost) -> None:
        self._core.on(self.run, ev.WorkerStalled(link.key, error))

    def on_stall_ended(self, link: WorkerLink, *, died: bool) -> None:
        self._core.on(self.run, ev.SuspectDied(link.key) if died else ev.SuspectHeard(link.key))


def _ticket(ticket: object) -> worker_pb2.HandoffTicket:
    assert isinstance(ticket, worker_pb2.HandoffTicket)
    return ticket


def _error(ended: worker_pb2.Ended) -> TandemError | None:
    return parse_error(ended.error) if ended.HasField("error") else None


def _reason(ended: worker_pb2.Ended) -> FinishReason | None:
    return _REASONS.get(ended.finish_reason)
