"""The router in virtual time: admission, placement, and the steps of a handoff.

Follows router.requests.dispatcher and router.requests.run; what they do by gRPC is an event here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.simulator.cache_feed import CacheFeed
from planner.simulator.events import EventLoop
from planner.simulator.fleet import MODEL, SimFleet
from planner.simulator.frames import Frames
from planner.simulator.links import push
from planner.simulator.losses import Losses
from planner.simulator.recorder import Recorder
from planner.simulator.requests import SimRequest
from planner.simulator.sequence import BlockNames, SimSequence
from planner.simulator.setup import Setup
from planner.simulator.worker import SimWorker
from router.admission.admission import Admission
from router.policies.profiles import policy_profile
from router.policies.types import Ask, Candidate, Placement, WaitReason
from router.prefix_index.in_flight_prefills import InFlightPrefills
from router.terms import Terms
from router.workers.account import Charge
from tandem.config.spec import Role
from tandem.errors import ContextExceeded, TandemError
from tandem.kvcache.layout import blocks_for
from tandem.request import RequestState

if TYPE_CHECKING:
    from planner.traces.trace import TrafficTrace
    from tandem.scheduler.plan import ExportRange

PUMP_EVERY_S = 0.001
Handler = Callable[..., None]


class SimCluster:
    """Owns the requests on their way. `WorkerHost` of its workers."""

    def __init__(self, trace: TrafficTrace, setup: Setup, loop: EventLoop, recorder: Recorder) -> None:
        self._trace, self._setup, self._loop, self._recorder = trace, setup, loop, recorder
        spec = setup.router
        self._policy = policy_profile(spec)
        self._admission: Admission[SimRequest] = Admission(
            spec.classes,
            max_queued_requests=spec.max_queued_requests,
            queue_timeout_s=spec.queue_timeout_s,
            budget_tokens=spec.max_prefill_tokens_in_flight,
        )
        self._classes = {each.name for each in spec.classes}
        self._in_flight = InFlightPrefills(loop)
        self._names = BlockNames(trace.prefixes, setup.block_tokens)
        self.fleet = SimFleet(setup, loop, self, recorder.intervals)
        self.cache = CacheFeed(loop, spec.index_memory_bytes, self.fleet)
        self.running: dict[str, SimRequest] = {}  # by the id of its sequences
        self.losses = Losses(self, setup, loop, recorder, self._names)
        self._frames = Frames(self, setup, loop, recorder, self._names)
        self._placed = 0
        self._next_pump_s: float | None = None
        self._pumped_s = -PUMP_EVERY_S

    # --- in ------------------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        now_s = self._loop.now_s()
        prompt = int(self._trace.prompt_tokens[index])
        name, tenant = self._trace.label_of(index)
        priority = name if name in self._classes else self._setup.router.classes[0].name
        hashes = self._names.of(index, prompt) if self._setup.caches else []
        output = int(self._trace.output_tokens[index])
        request = SimRequest(index, now_s, prompt, output, Terms(priority, tenant), hashes, waiting_since_s=now_s)
        request.lifecycle.admit()
        try:
            pushed_out = self._admission.offer(MODEL, request, request.terms, prompt, now_s)
        except TandemError as error:
            self._reject(request, error)
            return
        request.lifecycle.enqueue()
        for other, reason in pushed_out:
            self._reject(other, reason)
        self.pump()

    def pump(self) -> None:
        now_s = self._pumped_s = self._loop.now_s()
        self._admission.dispatch(now_s, self._place, self._prefillers)
        for request, error in self._admission.expire(now_s):
            self._reject(request, error)
        due_s = self._admission.next_due_s(now_s)
        if due_s is not None:
            self._pump_at(due_s)

    def waiting(self) -> list[SimRequest]:
        """In the router."""
        return self._admission.items()

    def _pump_at(self, at_s: float) -> None:
        at_s = max(at_s, self._pumped_s + PUMP_EVERY_S)
        if self._next_pump_s is None or at_s < self._next_pump_s:
            self._next_pump_s = at_s
            self._loop.at(at_s, self._pump_due, at_s)

    def _pump_due(self, at_s: float) -> None:
        if self._next_pump_s == at_s:
            self._next_pump_s = None
            self.pump()

    def _prefillers(self, model: str) -> int:
        decode = self.fleet.count(Role.DECODE)
        return decode and (self.fleet.count(Role.PREFILL) or decode)

    # --- placing -------------------------------------------------------------------------------------------------

    def _place(self, request: SimRequest) -> bool:
        if self._too_long(request):
            return True
        placement = self._decide(request)
        if isinstance(placement, WaitReason) and request.excluded:
            request.excluded = frozenset()
            placement = self._decide(request)
        if isinstance(placement, WaitReason):
            request.waiting_for = placement
            return False
        self._start(request, placement)
        return True

    def _decide(self, request: SimRequest) -> Placement | WaitReason:
        cached = self._in_flight.credit(self.cache.mirror.match(request.block_hashes), request.block_hashes)
        decode = self._fitting(request, self.fleet.candidates(Role.DECODE, cached))
        prefill = self._fitting(request, self.fleet.candidates(Role.PREFILL, cached))
        return self._policy.place(self._ask(request), decode, prefill)

    def _fitting(self, request: SimRequest, candidates: list[Candidate]) -> list[Candidate]:
        needed = blocks_for(request.prompt_tokens + 1, self._setup.block_tokens)
        return [each for each in candidates if each.total_blocks >= needed]

    def _too_long(self, request: SimRequest) -> bool:
        needed = blocks_for(request.prompt_tokens + 1, self._setup.block_tokens)
        most = self._setup.decode.kv_tokens // self._setup.block_tokens
        too_long = needed > most or request.prompt_tokens >= self._setup.max_model_tokens
        if too_long and self.fleet.count(Role.DECODE):
            self._reject(request, ContextExceeded(f"prompt: {request.prompt_tokens} tokens fit on no decode worker"))
            return True
        return False

    def _ask(self, request: SimRequest) -> Ask:
        # As a router with `max_tokens` of its clients would: an answer's length is not known before its end.
        expected = self.fleet.estimates.answer_tokens(MODEL)
        return Ask(request.prompt_tokens, request.excluded, expected, number=self._placed)

    def _start(self, request: SimRequest, placement: Placement) -> None:
        now_s = self._loop.now_s()
        request.attempt += 1
        request.decode = self.fleet.workers[placement.decode.worker_id]
        request.prefill = None if placement.prefill is None else self.fleet.workers[placement.prefill.worker_id]
        self._charge(request, placement.prefiller.uncached_tokens(self._ask(request)))
        self._placed += 1
        request.dispatched_s = now_s
        request.tokens_ahead = placement.prefiller.outstanding_tokens
        request.first_token_s = request.landed_s = request.sequence = None
        self._in_flight.began(request, (request.prefill or request.decode).key, request.block_hashes)
        self.running[request.sequence_id] = request
        request.lifecycle.start_prefill()
        if not request.migrations:
            self._recorder.dispatched_s[request.index] = now_s
        if request.prefill is None:
            self._recorder.local_prefills += 1
            self._send(request.decode, self._frames.generate, request, request.decode, request.attempt)
        else:
            self._recorder.handoffs += 1
            self._reserve_on(request, request.decode)

    def _charge(self, request: SimRequest, tokens: int) -> None:
        blocks = blocks_for(request.prompt_tokens + 1, self._setup.block_tokens)
        decode, prefill = request.decode, request.prefill
        assert decode is not None
        request.charges = [(decode, Charge(0 if prefill else tokens, blocks))]
        if prefill is not None:
            request.charges.append((prefill, Charge(tokens, blocks)))
        for worker, charge in request.charges:
            worker.account.add(charge)
            self.fleet.note(worker)

    def _release(self, request: SimRequest) -> None:
        for worker, charge in request.charges:
            worker.account.remove(charge)
            self.fleet.note(worker)
        request.charges = []

    def _send(self, worker: SimWorker, handle: Handler, request: SimRequest, *args: object) -> None:
        """One frame to a worker. Its first tells the worker of the request."""
        worker.sent_frames += 1
        for charged, charge in request.charges:
            if charged is worker and charge.frame is None:
                charge.frame = worker.sent_frames
        arrives_s = self._loop.now_s() + self._setup.network_s
        self._loop.at(arrives_s, worker.receive, worker.sent_frames, handle, request, *args)

    def later(self, handle: Handler, *args: object) -> None:
        """A frame to the router."""
        self._loop.at(self._loop.now_s() + self._setup.network_s, handle, *args)

    def _reserve_on(self, request: SimRequest, worker: SimWorker) -> None:
        request.reserve_sent_s = self._loop.now_s()
        self._send(worker, self._frames.reserve, request, worker, request.attempt)

    def is_over(self, request: SimRequest, attempt: int) -> bool:
        return request.attempt != attempt or request.lifecycle.state.is_end or not request.charges

    # --- what workers say ------------------------------------------------------------------------------------------

    def reserved(self, request: SimRequest, attempt: int) -> None:
        if self.is_over(request, attempt) or request.prefill is None:
            return
        now_s = self._loop.now_s()
        self.fleet.pace(Role.DECODE).reserved(now_s - request.reserve_sent_s)
        request.prefill_sent_s = now_s
        self._send(request.prefill, self._frames.prefill, request, request.prefill, attempt)

    def refused(self, request: SimRequest, attempt: int, refusal: TandemError) -> None:
        if self.is_over(request, attempt) or request.decode is None or request.prefill is None:
            return
        request.excluded |= {request.decode.key.worker_id}
        cached = self.cache.mirror.match(request.block_hashes)
        others = self._fitting(request, self.fleet.candidates(Role.DECODE, cached))
        choice = self._policy.another_decode(self._ask(request), others, self.fleet.candidate(request.prefill))
        if choice is None:
            self.put_back(request, refusal)
            return
        tokens = sum(charge.prefill_tokens for _, charge in request.charges)
        self._release(request)
        request.decode = self.fleet.workers[choice.worker_id]
        self._charge(request, tokens)
        self._reserve_on(request, request.decode)

    def joined(self, moved_tokens: int, exposed_s: float) -> None:
        self.fleet.pace(Role.DECODE).received(moved_tokens, exposed_s)

    def first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        request = self.running.get(sequence.request_id)
        if request is None:
            return
        now_s = self._loop.now_s() + self._setup.network_s
        request.first_token_s = self._loop.now_s()
        record, index = self._recorder, request.index
        record.last_token_s[index] = now_s
        if not request.migrations:
            record.first_token(index, now_s)
            record.cached_tokens[index] = sequence.cached_tokens or 0
            sent_s = request.prefill_sent_s if request.prefill else request.dispatched_s
            computed = max(1, request.prompt_tokens - (sequence.cached_tokens or 0))
            self.fleet.pace(worker.role).prefilled(request.tokens_ahead + computed, now_s - sent_s)
        self._admission.first_token(request, now_s)
        self._in_flight.computed(request)
        for charged, charge in request.charges:
            charged.account.prefilled(charge)
        if request.prefill is None:
            request.lifecycle.start_decode()
        elif request.output_tokens == 1:
            self._end(request, RequestState.FINISHED)
        else:
            request.lifecycle.start_handoff()
            self._try_join(request)
        self._pump_soon()

    def finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        request = self.running.get(sequence.request_id)
        if request is not None:
            self._recorder.last_token_s[request.index] = sequence.last_token_s + self._setup.network_s
            self._end(request, RequestState.FINISHED)

    def failed(self, worker: SimWorker, sequence_id: str, error: TandemError) -> None:
        request = self.running.get(sequence_id)
        if request is not None:
            request.excluded |= {worker.key.worker_id}
            self.losses.move_on(request, worker, error)

    def export(self, worker: SimWorker, part: ExportRange, start_s: float, end_s: float) -> None:
        request = self.running.get(part.request_id)
        if request is None or request.decode is None:
            return
        setup = self._setup
        tokens = (len(part.block_ids) - 1) * setup.block_tokens + part.last_block_tokens
        num_bytes = tokens * setup.kv_token_bytes
        seconds = worker.cost.transfer_s(int(num_bytes))
        done_s = push(
            worker.egress, request.decode.ingress,
            start_s=start_s, end_s=end_s, layers=setup.layers, transfer_s=seconds, num_bytes=num_bytes,
        )  # fmt: skip
        if part.is_last:
            self._loop.at(done_s, self._landed, request, worker, request.attempt)

    def paced(self, worker: SimWorker, batch: int, tokens: int, seconds: float) -> None:
        if worker.role is Role.DECODE:
            self.fleet.pace(Role.DECODE).decoded(batch, tokens, seconds)

    def changed(self, worker: SimWorker, *, room: bool) -> None:
        self.fleet.note(worker)
        self.cache.changed(worker)
        if room:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if len(self._admission):
            self._pump_at(self._loop.now_s())

    def _landed(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        self._send(worker, self._frames.release_export, request, worker, f"{request.index}.{attempt}")
        if not self.is_over(request, attempt):
            request.landed_s = self._loop.now_s()
            self._try_join(request)

    def _try_join(self, request: SimRequest) -> None:
        """The first token and every block are there."""
        if request.first_token_s is None or request.landed_s is None or request.decode is None:
            return
        if request.prefill is not None and request.cached_blocks * self._setup.block_tokens >= request.prompt_tokens:
            self._send(request.prefill, self._frames.release_export, request, request.prefill, request.sequence_id)
        self._send(request.decode, self._frames.join, request, request.decode, request.attempt)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end(self, request: SimRequest, state: RequestState) -> None:
        joined = request.lifecycle.state is RequestState.DECODING
        if state is RequestState.FINISHED:
            request.lifecycle.finish()
            self.fleet.estimates.answered(MODEL, int(self._trace.output_tokens[request.index]))
        else:
            request.lifecycle.fail()
        if not joined:
            for worker in request.workers:
                self._stop_on(worker, request)
        self._forget(request)
        self._admission.over(request)
        self._recorder.end(request.index, state)
        self._pump_soon()

    def _stop_on(self, worker: SimWorker, request: SimRequest) -> None:
        self._send(worker, self._frames.cancel, request, worker, request.sequence_id)

    def fail(self, request: SimRequest, attempt: int, error: TandemError) -> None:
        if not self.is_over(request, attempt):
            self._count_refusal(error)
            self._end(request, RequestState.FAILED)

    def _reject(self, request: SimRequest, error: TandemError) -> None:
        self._admission.over(request)
        self._count_refusal(error)
        if request.was_answered:
            request.lifecycle.fail()
            self._recorder.end(request.index, RequestState.FAILED)
        else:
            request.lifecycle.reject()
            self._recorder.end(request.index, RequestState.REJECTED)

    def _count_refusal(self, error: TandemError) -> None:
        code = error.code.value
        self._recorder.refusals[code] = self._recorder.refusals.get(code, 0) + 1

    def _forget(self, request: SimRequest) -> None:
        self.running.pop(request.sequence_id, None)
        self._in_flight.failed(request)
        self._release(request)

    def put_back(self, request: SimRequest, refusal: TandemError | None) -> None:
        for worker in request.workers:
            if not worker.lost:
                self._stop_on(worker, request)
        self._forget(request)
        request.lifecycle.migrate()
        request.lifecycle.enqueue()
        now_s = self._loop.now_s()
        self._admission.put_back(
            MODEL, request, request.terms, request.prompt_tokens,
            since_s=request.waiting_since_s, now_s=now_s, refusal=refusal,
        )  # fmt: skip
        self._pump_soon()

    @property
    def active(self) -> int:
        return len(self.running) + len(self._admission)
