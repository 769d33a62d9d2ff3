"""Everything the router decides about requests: admission, placement, retries, moves. Pure but for its clock.

    event ──▶ RequestRun.on ──▶ actions ──┬─▶ frames, output: the Carrier (gRPC links, or virtual time)
                                          ├─▶ decisions: admission and Placer, here
                                          └─▶ facts: observers

The router runs it behind `router.requests.dispatcher`, the simulator behind `planner.simulator.cluster`.
"""

from __future__ import annotations

from typing import Protocol

from router.admission.request_queue import RequestQueue
from router.policies.types import Placement, PlacementRules, WaitReason
from router.prefix_index.mirror import WorkerKey
from router.requests import actions as act
from router.requests import events as ev
from router.requests.facts import Arrived, Facts, Placed, Requeued, Waited
from router.requests.output import TextPiece
from router.requests.placer import FleetView, Placer, PrefixIndex
from router.requests.recording.recorder import Recorder
from router.requests.state_machine import RequestRun
from tandem.clock import Clock
from tandem.config.router import RouterSpec
from tandem.errors import TandemError, UnavailableError, WorkerLost

MOVE_RETRY_S = 0.2  # while a worker is to be emptied: until its requests that could not move try again


class Carrier(Protocol):
    """Carries actions out. Nothing here waits."""

    def send(self, run: RequestRun, frame: act.Frame) -> int | None:
        """Queues a frame for a worker. Returns its number in the worker's session; None: there is no link."""
        ...

    def emit(self, run: RequestRun, output: TextPiece | act.EmitPromptScores) -> bool:
        """Gives the client a part of the answer. False: it has left too much unread."""
        ...

    def ended(self, run: RequestRun, end: act.End) -> None:
        """The request reached its end state."""
        ...

    def pump_soon(self) -> None:
        """Calls `RequestCore.pump` soon, once for all that happens until then."""
        ...


class RequestCore:
    """All requests of one router, from admission to their end."""

    def __init__(
        self,
        spec: RouterSpec,
        policy: PlacementRules,
        fleet: FleetView,
        index: PrefixIndex,
        clock: Clock,
        carrier: Carrier,
        facts: Facts,
        recorder: Recorder | None = None,
    ) -> None:
        self.queue: RequestQueue[RequestRun] = RequestQueue(
            spec.classes,
            max_queued_requests=spec.max_queued_requests,
            queue_timeout_s=spec.queue_timeout_s,
            budget_tokens=spec.max_prefill_tokens_in_flight,
        )
        self.placer = Placer(policy, fleet, index, clock)
        self.facts = facts
        self._fleet, self._clock, self._carrier = fleet, clock, carrier
        self._held: set[RequestRun] = set()  # until it is known what became of a worker that stalled with them
        self._recorder = recorder
        if recorder is not None:
            self.placer.seen = recorder.placements

    @property
    def unrecorded(self) -> int:
        """Events and placements that could not be recorded."""
        return 0 if self._recorder is None else self._recorder.failures

    @property
    def active(self) -> int:
        """Requests that wait or are on workers."""
        return len(self.placer) + len(self.queue) + len(self._held)

    def waiting(self) -> list[RequestRun]:
        return [*self.queue.items(), *self._held]

    def running(self) -> list[RequestRun]:
        """Those on workers."""
        return list(self.placer)

    # ---- in

    def submit(self, run: RequestRun) -> None:
        """Queues a request. Raises the TandemError that it was rejected with: OverloadedError, DeadlineExceeded."""
        now_s = self._clock.now_s()
        self.on(run, ev.Submitted())
        self.facts.publish(run, Arrived(), now_s)
        try:
            pushed_out = self.queue.offer(run.request.model, run, run.terms, run.prefill_tokens, now_s)
        except TandemError as error:
            self.on(run, ev.Rejected(error))
            raise
        self.on(run, ev.Queued())
        for other, reason in pushed_out:
            self.on(other, ev.Rejected(reason))

    def refuse(self, run: RequestRun, error: TandemError) -> None:
        """Rejects a request without offering it to admission."""
        self.on(run, ev.Submitted())
        self.facts.publish(run, Arrived(), self._clock.now_s())
        self.on(run, ev.Rejected(error))

    def on(self, run: RequestRun, event: ev.Event) -> None:
        """Feeds an event to a run and carries out what it wants done."""
        if self._recorder is None:
            run.on(event, self._clock.now_s())
        else:
            self._recorder.on(run, event, self._clock.now_s())
        run.carry_out(self.perform)
        if self._held and run in self._held and not run.deaths.awaits_suspects:
            self._held.discard(run)
            self._queue_again(run)

    def perform(self, run: RequestRun, action: act.Action) -> None:
        if isinstance(action, (TextPiece, act.EmitPromptScores)):
            if not self._carrier.emit(run, action):
                self.on(run, ev.ReaderBehind())
        elif isinstance(action, act.Frame):
            self._send(run, action)
        elif isinstance(action, act.Fact):
            self.facts.publish(run, action, run.now_s)
            self._act_on(run, action)
        elif isinstance(action, act.ChooseDecode):
            self._choose_decode(run, action.refusal)
        else:
            self._put_back(run, action.cause, refused=action.refused)

    def _act_on(self, run: RequestRun, fact: act.Fact) -> None:
        match fact:
            case act.FirstToken():
                self.queue.first_token(run, run.now_s)
                self.placer.prefilled(run)
                self._carrier.pump_soon()
            case act.Moved(source=source):
                self.placer.leave(run, source)
                self._carrier.pump_soon()
            case act.MoveFailed(target=target):
                self.placer.leave(run, target)
            case act.End():
                self._end(run, fact)

    # ---- placing

    def pump(self, most: int | None = None) -> float | None:
        """Places what can be placed now; after `most` tries the rest is for the next pump, soon. Called when a worker,
        a request or the clock has changed something. Returns when time alone changes something next; None: never."""
        now_s = self._clock.now_s()
        tries = 0

        def place(run: RequestRun) -> bool:
            nonlocal tries
            if tries == most:
                self._carrier.pump_soon()
                return False
            tries += 1
            return self._place(run)

        self.queue.dispatch(now_s, place, self.placer.prefillers)
        for run, error in self.queue.expire(now_s):
            self.on(run, ev.Rejected(error))
        self._move_off()
        for run in self.queue.oversized_batch():
            self.on(run, ev.Yielded(UnavailableError("gave way to requests that are not of a batch class")))
        due_s = self.queue.next_due_s(now_s)
        if len(self.placer) and self._fleet.leaving():
            due_s = now_s + MOVE_RETRY_S if due_s is None else min(due_s, now_s + MOVE_RETRY_S)
        return due_s

    def _place(self, run: RequestRun) -> bool:
        outcome = self.placer.place(run)
        if self._recorder is not None:
            self._recorder.placed(run, self._clock.now_s())
        if isinstance(outcome, TandemError):
            self.on(run, ev.Rejected(outcome))
            return True
        if isinstance(outcome, WaitReason):
            if run.waiting_for is not outcome:
                run.waiting_for = outcome
                self.facts.publish(run, Waited(outcome), self._clock.now_s())
            return False
        if not self.placer.occupy(run, outcome):
            return False  # a worker is gone; the directory's next change calls again
        self.facts.publish(run, Placed(outcome), self._clock.now_s())
        self.on(run, _started(outcome))
        return True

    def _move_off(self) -> None:
        """Requests that decode on workers that are to be emptied go on elsewhere, as others have room."""
        for run in self.placer.to_move():
            target = self.placer.next_decode(run) if run.can_move else None
            if target is not None and self.placer.add_target(run, target):
                self.on(run, ev.MoveStarted(target))

    # ---- carrying out

    def _send(self, run: RequestRun, frame: act.Frame) -> None:
        number = self._carrier.send(run, frame)
        if not isinstance(frame, act.Opening):
            return
        if number is not None:
            self.placer.sent(run, frame.worker, number)
        else:
            lost = WorkerLost(f"worker {frame.worker.worker_id} was lost; a retry may succeed", retry_after_s=1.0)
            self.on(run, ev.WorkerGone(frame.worker, lost))

    def _choose_decode(self, run: RequestRun, refusal: TandemError) -> None:
        decode = self.placer.another_decode(run)
        if decode is not None and self.placer.reroute(run, decode):
            self.on(run, ev.Rerouted(decode))
        else:
            self._put_back(run, refusal, refused=True)

    def _put_back(self, run: RequestRun, cause: TandemError, *, refused: bool) -> None:
        self.facts.publish(run, Requeued(cause, refused), run.now_s)
        self.placer.release(run)
        if run.deaths.awaits_suspects:
            self._held.add(run)  # not in the queue, whose head all others wait for
        else:
            self._queue_again(run, cause if refused else None)

    def _queue_again(self, run: RequestRun, refusal: TandemError | None = None) -> None:
        self.queue.put_back(
            run.request.model,
            run,
            run.terms,
            run.prefill_tokens,
            since_s=run.waiting_since_s,
            now_s=self._clock.now_s(),
            refusal=refusal,
        )
        self._carrier.pump_soon()

    def _end(self, run: RequestRun, end: act.End) -> None:
        self._held.discard(run)
        had_place = run in self.placer or run in self.queue
        self.placer.release(run)
        self.queue.remove(run)
        self._carrier.ended(run, end)
        if had_place:  # what was refused at once leaves nothing to others
            self._carrier.pump_soon()


def _started(placement: Placement) -> ev.Started:
    decode, prefill = placement.decode, placement.prefill
    return ev.Started(
        WorkerKey(decode.worker_id, decode.epoch),
        None if prefill is None else WorkerKey(prefill.worker_id, prefill.epoch),
        placement.prefiller.cached_tokens,
        placement.prefiller.outstanding_tokens,
    )
