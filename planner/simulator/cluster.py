"""The router in virtual time: admission, placement, the steps of a handoff, and what is lost with a worker.

Follows router.dispatch and router.run, with the same pure classes; only what they do by gRPC is an event here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.simulator.cache_feed import CacheFeed
from planner.simulator.events import EventLoop
from planner.simulator.fleet import MODEL, SimFleet
from planner.simulator.links import push
from planner.simulator.recorder import Recorder
from planner.simulator.requests import SimRequest
from planner.simulator.sequence import BlockNames, SimSequence, TokenCount
from planner.simulator.setup import Setup
from planner.simulator.worker import SimWorker
from router.account import Charge
from router.admission import Admission
from router.in_flight_prefills import InFlightPrefills
from router.policies.profiles import policy_profile
from router.policies.types import Ask, Candidate, Placement, WaitReason
from router.terms import Terms
from tandem.blockhash import HashKey
from tandem.config import Role
from tandem.errors import ContextExceeded, KvExhausted, TandemError, WorkerLost
from tandem.kvcache.layout import blocks_for
from tandem.request import RequestState, SamplingParams

if TYPE_CHECKING:
    from planner.traces.trace import Trace
    from tandem.scheduler.scheduler import ExportRange

PUMP_EVERY_S = 0.001
_KEY = HashKey("simulated")
Handler = Callable[..., None]


class SimCluster:
    """Owns the requests on their way. `WorkerHost` of its workers."""

    def __init__(self, trace: Trace, setup: Setup, loop: EventLoop, recorder: Recorder) -> None:
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
        self._running: dict[str, SimRequest] = {}  # by the id of its sequences
        self._placed = 0
        self._arrivals = 0
        self._next_pump_s: float | None = None
        self._pumped_s = -PUMP_EVERY_S

    # --- in ------------------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        now_s = self._loop.now_s()
        prompt = int(self._trace.prompt_tokens[index])
        name, tenant = self._trace.label_of(index)
        priority = name if name in self._classes else self._setup.router.classes[0].name
        hashes = self._names.of(index, prompt)
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
        self._pump()

    def _pump(self) -> None:
        now_s = self._pumped_s = self._loop.now_s()
        self._admission.dispatch(now_s, self._place, self._prefillers)
        for request, error in self._admission.expire(now_s):
            self._reject(request, error)
        due_s = self._admission.next_due_s(now_s)
        if due_s is not None:
            self._pump_at(due_s)

    def _pump_at(self, at_s: float) -> None:
        at_s = max(at_s, self._pumped_s + PUMP_EVERY_S)
        if self._next_pump_s is None or at_s < self._next_pump_s:
            self._next_pump_s = at_s
            self._loop.at(at_s, self._pump_due, at_s)

    def _pump_due(self, at_s: float) -> None:
        if self._next_pump_s == at_s:
            self._next_pump_s = None
            self._pump()

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
        decode, prefill = (self._fitting(request, self.fleet.candidates(role, cached)) for role in (Role.DECODE, Role.PREFILL))
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
        self._running[request.sequence_id] = request
        request.lifecycle.start_prefill()
        if not request.migrations:
            self._recorder.dispatched_s[request.index] = now_s
        if request.prefill is None:
            self._recorder.local_prefills += 1
            self._send(request.decode, self._generate, request, request.decode, request.attempt)
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

    def _later(self, handle: Handler, *args: object) -> None:
        """A frame to the router."""
        self._loop.at(self._loop.now_s() + self._setup.network_s, handle, *args)

    def _sequence(self, request: SimRequest, export_from_block: int | None = None) -> SimSequence:
        self._arrivals += 1
        tokens = TokenCount(request.prompt_tokens)
        return SimSequence(
            request_id=request.sequence_id,
            tokens=tokens,
            prompt_tokens=request.prompt_tokens,
            sampling=SamplingParams(max_tokens=request.output_tokens),
            hash_key=_KEY,
            block_tokens=self._setup.block_tokens,
            arrival=self._arrivals,
            export_from_block=export_from_block,
            index=request.index,
            maker=self._names,
            counted=tokens,
            last_token_s=self._last_token_s(request),
            _hashes=request.block_hashes,
        )

    def _last_token_s(self, request: SimRequest) -> float:
        """Of one that goes on elsewhere; 0 before its first token."""
        return float(self._recorder.last_token_s[request.index]) if request.migrations else 0.0

    # --- on workers: these run between two steps ------------------------------------------------------------------

    def _generate(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        if self._is_over(request, attempt):
            return
        sequence = request.sequence = self._sequence(request)
        try:
            worker.scheduler.add(sequence)
        except TandemError as error:
            self._later(self._fail, request, attempt, error)

    def _reserve_on(self, request: SimRequest, worker: SimWorker) -> None:
        request.reserve_sent_s = self._loop.now_s()
        self._send(worker, self._reserve, request, worker, request.attempt)

    def _reserve(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        if self._is_over(request, attempt):
            return
        sequence = self._sequence(request)
        try:
            cached_blocks = worker.scheduler.reserve(sequence)
        except KvExhausted as refusal:
            self._later(self._refused, request, attempt, refusal)
            return
        except TandemError as error:
            self._later(self._fail, request, attempt, error)
            return
        request.sequence, request.cached_blocks = sequence, cached_blocks
        self._later(self._reserved, request, attempt)

    def _prefill(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        if self._is_over(request, attempt):
            return
        if request.cached_blocks * self._setup.block_tokens >= request.prompt_tokens:
            request.landed_s = self._loop.now_s()  # nothing to send: only the first token is wanted
        try:
            worker.scheduler.add(self._sequence(request, export_from_block=request.cached_blocks))
        except TandemError as error:
            self._later(self._fail, request, attempt, error)

    def _join(self, request: SimRequest, worker: SimWorker, attempt: int) -> None:
        sequence = request.sequence
        if self._is_over(request, attempt) or sequence is None or request.first_token_s is None:
            return
        worker.scheduler.join(sequence.request_id, 0)
        sequence.last_token_s = request.first_token_s
        request.lifecycle.start_decode()
        exposed_s = max(0.0, self._loop.now_s() - request.first_token_s)
        moved = request.prompt_tokens - request.cached_blocks * self._setup.block_tokens
        self.fleet.pace(Role.DECODE).received(moved, exposed_s)

    def _cancel(self, request: SimRequest, worker: SimWorker, sequence_id: str) -> None:
        worker.scheduler.cancel(sequence_id)

    def _is_over(self, request: SimRequest, attempt: int) -> bool:
        return request.attempt != attempt or request.lifecycle.state.is_end or not request.charges

    # --- what workers say ------------------------------------------------------------------------------------------

    def _reserved(self, request: SimRequest, attempt: int) -> None:
        if self._is_over(request, attempt) or request.prefill is None:
            return
        now_s = self._loop.now_s()
        self.fleet.pace(Role.DECODE).reserved(now_s - request.reserve_sent_s)
        request.prefill_sent_s = now_s
        self._send(request.prefill, self._prefill, request, request.prefill, attempt)

    def _refused(self, request: SimRequest, attempt: int, refusal: TandemError) -> None:
        if self._is_over(request, attempt) or request.decode is None or request.prefill is None:
            return
        request.excluded |= {request.decode.key.worker_id}
        cached = self.cache.mirror.match(request.block_hashes)
        others = self._fitting(request, self.fleet.candidates(Role.DECODE, cached))
        choice = self._policy.another_decode(self._ask(request), others, self.fleet.candidate(request.prefill, 0))
        if choice is None:
            self._put_back(request, refusal)
            return
        tokens = sum(charge.prefill_tokens for _, charge in request.charges)
        self._release(request)
        request.decode = self.fleet.workers[choice.worker_id]
        self._charge(request, tokens)
        self._reserve_on(request, request.decode)

    def first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        request = self._running.get(sequence.request_id)
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
        request = self._running.get(sequence.request_id)
        if request is not None:
            self._recorder.last_token_s[request.index] = sequence.last_token_s + self._setup.network_s
            self._end(request, RequestState.FINISHED)

    def failed(self, worker: SimWorker, sequence_id: str, error: TandemError) -> None:
        request = self._running.get(sequence_id)
        if request is not None:
            self._fail(request, request.attempt, error)

    def export(self, worker: SimWorker, part: ExportRange, start_s: float, end_s: float) -> None:
        request = self._running.get(part.request_id)
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
        self._send(worker, self._release_export, request, worker, f"{request.index}.{attempt}")
        if not self._is_over(request, attempt):
            request.landed_s = self._loop.now_s()
            self._try_join(request)

    def _release_export(self, request: SimRequest, worker: SimWorker, sequence_id: str) -> None:
        if sequence_id in worker.scheduler.sequences:
            worker.scheduler.release_export(sequence_id)

    def _try_join(self, request: SimRequest) -> None:
        """The first token and every block are there."""
        if request.first_token_s is None or request.landed_s is None or request.decode is None:
            return
        if request.prefill is not None and request.cached_blocks * self._setup.block_tokens >= request.prompt_tokens:
            self._send(request.prefill, self._release_export, request, request.prefill, request.sequence_id)
        self._send(request.decode, self._join, request, request.decode, request.attempt)

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
        self._send(worker, self._cancel, request, worker, request.sequence_id)

    def _fail(self, request: SimRequest, attempt: int, error: TandemError) -> None:
        if not self._is_over(request, attempt):
            self._count_refusal(error)
            self._end(request, RequestState.FAILED)

    def _reject(self, request: SimRequest, error: TandemError) -> None:
        self._admission.over(request)
        request.lifecycle.reject()
        self._count_refusal(error)
        self._recorder.end(request.index, RequestState.REJECTED)

    def _count_refusal(self, error: TandemError) -> None:
        code = error.code.value
        self._recorder.refusals[code] = self._recorder.refusals.get(code, 0) + 1

    def _forget(self, request: SimRequest) -> None:
        self._running.pop(request.sequence_id, None)
        self._in_flight.failed(request)
        self._release(request)

    def _put_back(self, request: SimRequest, refusal: TandemError | None) -> None:
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

    # --- what is lost ------------------------------------------------------------------------------------------------

    def lose_worker(self, worker_id: str, back_after_s: float | None) -> None:
        """Its requests go on elsewhere: their prompts and what was answered are computed again."""
        worker = self.fleet.workers[worker_id]
        self.fleet.lose(worker)
        self.cache.drop(worker.key)
        error = WorkerLost(f"{worker_id} was lost")
        for request in [each for each in self._running.values() if worker in each.workers]:
            self._move_on(request, worker, error)
        if back_after_s is not None:
            key = worker.key
            self._loop.at(
                self._loop.now_s() + back_after_s, self._come_back, key.worker_id, worker.role, key.epoch + 1
            )

    def _come_back(self, worker_id: str, role: Role, epoch: int) -> None:
        self.cache.load(self.fleet.start(worker_id, role, epoch))
        self._pump()

    def _move_on(self, request: SimRequest, lost: SimWorker, error: TandemError) -> None:
        if lost is request.prefill and request.landed_s is not None and request.first_token_s is not None:
            return  # it has left that worker
        if request.migrations >= self._setup.router.max_migrations:
            self._fail(request, request.attempt, error)
            return
        answered = self._answered(request)
        if answered:
            request.prompt_tokens += answered
            request.output_tokens -= answered
            full = request.prompt_tokens // self._setup.block_tokens
            own = self._names.own(request.index, len(request.block_hashes), full)
            request.block_hashes = request.block_hashes + own
        request.migrations += 1
        self._recorder.migrations[request.index] += 1
        request.waiting_since_s = self._loop.now_s()
        self._put_back(request, None)

    def _answered(self, request: SimRequest) -> int:
        """Tokens of this attempt that the router has; also notes when the last of them came."""
        if request.first_token_s is None:
            return 0
        sequence = request.sequence
        if sequence is None or sequence.last_token_s <= 0:
            return 1
        self._recorder.last_token_s[request.index] = sequence.last_token_s
        return min(max(1, sequence.generated), request.output_tokens - 1)

    def slow_link(self, worker_id: str, factor: float) -> None:
        """`factor` 1 makes it whole again."""
        worker = self.fleet.workers.get(worker_id)
        if worker is not None:
            for port in (worker.egress, worker.ingress):
                port.slowdown = factor

    @property
    def active(self) -> int:
        return len(self._running) + len(self._admission)
