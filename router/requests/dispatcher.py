"""Takes requests in, places them on workers when there is room, and keeps the account of who does what."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from kvtransfer.causes import HandoffFault
from router.admission.admission import Admission
from router.dashboard.feed import Feed
from router.observe.demand import DemandMeter
from router.observe.export import TraceExport
from router.observe.metrics.requests import RouterMetrics
from router.observe.paces import observe_decode, observe_handoff, observe_prefill
from router.observe.request_tap import RequestTap
from router.observe.trace import Attempt, TraceStore
from router.policies.policy import PlacementPolicy
from router.policies.types import Ask, Candidate, Placement, WaitReason
from router.prefix_index.in_flight_prefills import InFlightPrefills
from router.prefix_index.mirror import PrefixMirror, WorkerKey
from router.probes import health_facts
from router.requests.charges import Charges
from router.requests.deadlines import Deadlines
from router.requests.output import OutputAssembler, ResponseStream
from router.requests.request import ServingModel, ValidRequest
from router.requests.run import RequestRun
from router.terms import Terms
from router.workers.account import Charge
from router.workers.fleet import Fleet, Worker
from tandem.clock import Clock
from tandem.config.spec import Role, RouterSpec
from tandem.errors import ContextExceeded, ErrorCode, KvExhausted, TandemError, UnavailableError
from tandem.kvcache.layout import blocks_for
from tandem.v1 import worker_pb2

log = logging.getLogger(__name__)

CANCELLED_DRAIN_S = 0.2
DRAIN_POLL_S = 0.05
MOVE_RETRY_S = 0.2  # while a worker is to be emptied: those that were not ready to leave it, or found no room


class Dispatcher:
    """Runs on the event loop's thread; nothing in it waits."""

    def __init__(
        self,
        *,
        spec: RouterSpec,
        fleet_of: Callable[[Callable[[], None]], Fleet],
        mirror: PrefixMirror,
        policy: PlacementPolicy,
        metrics: RouterMetrics,
        feed: Feed,
        clock: Clock,
        export: TraceExport | None = None,
    ) -> None:
        self.traces = TraceStore()
        self.tap = RequestTap()
        self.demand = DemandMeter(spec.classes)
        self._export = export
        self._mirror = mirror
        self._policy = policy
        self._metrics = metrics
        self._feed = feed
        self._clock = clock
        self._max_migrations = spec.max_migrations
        self.admission: Admission[RequestRun] = Admission(
            spec.classes,
            max_queued_requests=spec.max_queued_requests,
            queue_timeout_s=spec.queue_timeout_s,
            budget_tokens=spec.max_prefill_tokens_in_flight,
        )
        metrics.watch_admission(self.admission)
        metrics.watch_classes(spec.classes)
        self._default_terms = Terms(spec.classes[0].name)
        self._deadlines = Deadlines(clock)
        self._in_flight = InFlightPrefills(clock)
        self._running = Charges()
        self._timer: asyncio.TimerHandle | None = None
        self._pump_due = False
        self.draining = False
        self._closed = False
        self._placed = 0
        self.fleet = fleet_of(self.pump)

    def submit(self, model: ServingModel, request: ValidRequest, terms: Terms | None = None) -> ResponseStream:
        """Queues a request and returns what will come of it.

        Raises OverloadedError, UnavailableError, DeadlineExceeded.
        """
        terms = terms or self._default_terms
        assembler = OutputAssembler(model.tokenizer, request.prompt, request.stop, request.sampling.stop_token_ids)
        run = RequestRun(request, assembler, terms, self._clock, self, self._max_migrations)
        run.lifecycle.admit()
        self.demand.came(run)
        try:
            if self.draining:
                raise UnavailableError("the router is shutting down; retry elsewhere", retry_after_s=1.0)
            now_s = self._clock.now_s()
            pushed_out = self.admission.offer(request.model, run, terms, run.prefill_tokens, now_s)
        except TandemError as error:
            run.reject(error)
            raise
        run.lifecycle.enqueue()
        self._deadlines.watch(run, terms.deadline_s)
        for other, reason in pushed_out:
            other.reject(reason)
        self.pump()
        return run.stream

    def pump(self) -> None:
        """Places what can be placed now. Called whenever a worker, a request or the clock has changed something."""
        now_s = self._clock.now_s()
        self.fleet.sweep()
        self.admission.dispatch(now_s, self._place, self._prefillers)
        for run, error in self.admission.expire(now_s):
            run.reject(error)
        self._move_off()
        for run in self.admission.in_the_way():
            run.step_back(UnavailableError("gave way to requests that are not of a batch class"))
        self._metrics.set_load(queued=len(self.admission), running=len(self._running))
        self._set_timer(now_s)

    def pump_waiting(self) -> None:
        """A worker may have room now: of no interest while nobody waits."""
        if len(self.admission):
            self.pump()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits for those there are, so long."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.active:  # noqa: ASYNC110  # requests end in many ways, and this is asked once in a life
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Refuses new requests and cancels those there are."""
        self.draining = self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        rest = [*self._running, *self.admission.items()]
        for run in rest:
            run.cancel()
        if rest:
            await asyncio.sleep(CANCELLED_DRAIN_S)  # cancels go out
        await self.fleet.close()

    def running(self) -> list[RequestRun]:
        """Those on workers."""
        return list(self._running)

    @property
    def active(self) -> int:
        return len(self._running) + len(self.admission)

    # ---- placing

    def _place(self, run: RequestRun) -> bool:
        placement = self.decide(run)
        if isinstance(placement, WaitReason) and self._too_long(run):
            return True
        if isinstance(placement, WaitReason) and run.excluded:
            # Nobody else can take it: decode workers that failed or refused are asked again,
            run.excluded -= {worker.key.worker_id for worker in self.fleet.ready(run.request.model, Role.DECODE)}
            placement = self.decide(run)
        if isinstance(placement, WaitReason) and run.excluded:
            run.excluded = frozenset()  # and then all.
            placement = self.decide(run)
        if isinstance(placement, WaitReason):
            if run.waiting_for is not placement:
                self._metrics.waited(run.request.model, placement)
            run.waiting_for = placement
            return False
        decode, prefill = self._workers_of(placement)
        if decode is None or (placement.prefill is not None and prefill is None):
            return False  # gone between two lines; the directory's next change calls again
        self._metrics.placed(run.request.model, placement.reason)
        self._feed.placed(run, placement)
        tokens = placement.prefiller.uncached_tokens(self._ask(run))
        self._running.place(run, decode, prefill, _blocks_needed(run), tokens)
        self._placed += 1
        run.credited_tokens = placement.prefiller.cached_tokens
        run.tokens_ahead = placement.prefiller.outstanding_tokens
        self._in_flight.began(run, (prefill or decode).key, run.request.block_hashes)
        run.start(decode, prefill)
        return True

    def _prefillers(self, model: str) -> int:
        """Workers that prefill for a model; 0 without a decode worker."""
        decode = len(self.fleet.ready(model, Role.DECODE))
        return decode and (len(self.fleet.ready(model, Role.PREFILL)) or decode)

    def decide(self, run: RequestRun) -> Placement | WaitReason:
        """Where it would go now, or why it would wait. Changes nothing."""
        model = run.request.model
        decode, prefill = self.fleet.ready(model, Role.DECODE), self.fleet.ready(model, Role.PREFILL)
        hashes = run.request.block_hashes
        cached = self._in_flight.credit(self._mirror.match(hashes), hashes)
        return self._policy.place(self._ask(run), self._views(run, decode, cached), self._views(run, prefill, cached))

    def _too_long(self, run: RequestRun) -> bool:
        """Refuses a prompt that no decode worker there is could ever hold."""
        needed = _blocks_needed(run)
        sizes = [worker.total_blocks for worker in self.fleet.ready(run.request.model, Role.DECODE)]
        if not sizes or any(size >= needed or not size for size in sizes):
            return False
        most = max(sizes) * run.request.block_tokens - 1
        limit = f"expected at most {most} tokens (a worker's KV blocks), got {run.prefill_tokens}"
        if run.answer_tokens:  # the worker that had room for it is gone
            run.reject(KvExhausted(f"prompt and answer so far: {limit}; a retry may succeed", retry_after_s=1.0))
        else:
            run.reject(ContextExceeded(f"prompt: {limit}", field="prompt"))
        return True

    def _views(self, run: RequestRun, workers: list[Worker], cached: dict[WorkerKey, int]) -> list[Candidate]:
        needed = _blocks_needed(run)
        views = [worker.candidate(cached.get(worker.key, 0) * run.request.block_tokens) for worker in workers]
        return [view for view in views if view.total_blocks >= needed or not view.total_blocks]

    def _ask(self, run: RequestRun) -> Ask:
        request = run.request
        left = request.sampling.max_tokens - run.answer_tokens
        expected = min(left, self.fleet.estimates.answer_tokens(request.model))
        return Ask(run.prefill_tokens, run.excluded, expected, request.session, self._placed)

    def _workers_of(self, placement: Placement) -> tuple[Worker | None, Worker | None]:
        decode, prefill = placement.decode, placement.prefill
        return (
            self.fleet.worker(decode.worker_id, decode.epoch),
            None if prefill is None else self.fleet.worker(prefill.worker_id, prefill.epoch),
        )

    def _move_off(self) -> None:
        """Requests that decode on workers that are to be emptied go on elsewhere, as others have room."""
        leaving = self.fleet.leaving()
        if not leaving:
            return
        for run in [run for run in self._running if any(run.decode is worker for worker in leaving)]:
            model = run.request.model
            cached = self._mirror.match(run.request.block_hashes)
            candidates = self._views(run, self.fleet.ready(model, Role.DECODE), cached)
            choice = self._policy.next_decode(self._ask(run), candidates)
            if choice is None:
                run.excluded = frozenset()  # those that failed are asked again
                continue
            target = self.fleet.worker(choice.worker_id, choice.epoch)
            if target is not None and run.move_to(target):
                self._running.add(run, target, Charge(0, _blocks_needed(run)))

    # ---- what requests ask (router.requests.run_host.RunHost)

    def moved(self, run: RequestRun, source: Worker) -> None:
        self._running.leave(run, source)
        self._metrics.moved(run.request.model, done=True)
        self._pump_soon()

    def move_failed(self, run: RequestRun, target: Worker) -> None:
        self._running.leave(run, target)
        run.excluded |= {target.key.worker_id}
        self._metrics.moved(run.request.model, done=False)

    def sent(self, run: RequestRun, worker: Worker) -> None:
        self._running.sent(run, worker)

    def refused(self, run: RequestRun, refusal: TandemError) -> None:
        prefill = run.prefill
        model = run.request.model
        cached = self._mirror.match(run.request.block_hashes)
        others = self._views(run, self.fleet.ready(model, Role.DECODE), cached)
        choice = None
        if prefill is not None:
            sender = prefill.candidate(run.credited_tokens)
            choice = self._policy.another_decode(self._ask(run), others, sender)
        decode = None if choice is None else self.fleet.worker(choice.worker_id, choice.epoch)
        if decode is not None and prefill is not None:
            tokens = self._running.prefill_tokens(run)
            self._running.release(run)
            self._running.place(run, decode, prefill, _blocks_needed(run), tokens)
            run.try_next(decode)
            return
        self._put_back(run, refusal)

    def requeue(self, run: RequestRun, cause: TandemError, *, refused: bool) -> None:
        words = run.trace.names() | {"cause": str(cause), "answer_tokens": str(run.answer_tokens)}
        log.info("request goes back in line", extra=words)
        self._metrics.retried(run.request.model, cause.code)
        if not refused:
            self._feed.requeued(run, cause)
        self._put_back(run, cause if refused else None)

    def prefilled(self, run: RequestRun) -> None:
        if not run.answer_tokens:  # else it is continued, and its prompt was longer
            observe_prefill(run)
            self._metrics.credited(run.request.model, run.credited_tokens, run.wrong_credit_tokens)
            self._feed.first_token(run)
            self.demand.first_token(run, self._clock.now_s())
        self.admission.first_token(run, self._clock.now_s())
        self._in_flight.computed(run)
        if run.prefill is not None and run in self._running:
            tokens = self._running.prefill_tokens(run)
            health_facts.prefilled(self.fleet.health, run, run.prefill, tokens, self._clock.now_s())
        self._running.prefilled(run)
        self._pump_soon()

    def handed_off(self, run: RequestRun, attempt: Attempt, done: worker_pb2.HandoffDone) -> None:
        observe_handoff(run, attempt, done)
        self._metrics.handed_off(run.request.model, attempt, done)
        self._feed.handed_off(attempt, done)

    def blamed(self, run: RequestRun, worker_ids: Sequence[str]) -> None:
        health_facts.blamed(self.fleet.health, run, worker_ids, self._clock.now_s())

    def paced(self, run: RequestRun, seconds: float) -> None:
        observe_decode(run, seconds)

    def gaps(self, run: RequestRun, gaps_s: Sequence[float], now_s: float) -> None:
        self._feed.next_tokens(gaps_s, now_s)
        self._metrics.gaps(run.request.model, gaps_s)

    def handoff_failed(self, run: RequestRun, fault: HandoffFault) -> None:
        self._metrics.handoff_failed(run.request.model, fault.cause)
        self._feed.handoff_failed(run, fault)

    def ended(self, run: RequestRun, error: TandemError | None) -> None:
        self.traces.add(run.trace)
        self.tap.ended(run)
        if self._export is not None:
            self._export.offer(run.trace)
        self._feed.ended(run)
        had_place = run in self._running or run in self.admission
        self._in_flight.failed(run)
        self._running.release(run)
        self.admission.over(run)
        self._deadlines.over(run)
        model, code = run.request.model, None if error is None else error.code
        self.demand.ended(run, code)
        self._metrics.judged(model, run.terms.priority, run.stream.final, run.lifecycle.state, code)
        _tell_call(run, error)
        if run.stream.final is not None:
            self._metrics.finished(model, run.stream.final, run.trace)
            health_facts.finished(self.fleet.health, run, run.stream.final, self._clock.now_s())
            self.fleet.estimates.answered(model, run.stream.final.usage.completion_tokens)
        else:
            self._metrics.ended(model, run.lifecycle.state, code)
        if error is not None and error.code is ErrorCode.INTERNAL:
            log.error("request failed", extra=run.trace.names() | {"error": str(error)})
        if had_place:  # what was refused at once leaves nothing to others
            self._pump_soon()

    def _put_back(self, run: RequestRun, refusal: TandemError | None) -> None:
        self._in_flight.failed(run)
        self._running.release(run)
        self.admission.put_back(
            run.request.model,
            run,
            run.terms,
            run.prefill_tokens,
            since_s=run.waiting_since_s,
            now_s=self._clock.now_s(),
            refusal=refusal,
        )
        self._pump_soon()

    # ---- time

    def _pump_soon(self) -> None:
        """Once for all that comes in one turn of the event loop, and not at once: we may be inside the handling of a
        frame that has more to say."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pump_due = False
        self.pump()

    def _set_timer(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.admission.next_due_s(now_s)
        if self.fleet.leaving() and self._running:
            due_s = min(due_s or math.inf, now_s + MOVE_RETRY_S)
        if due_s is not None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, due_s - now_s), self.pump)


def _blocks_needed(run: RequestRun) -> int:
    return blocks_for(run.prefill_tokens + 1, run.request.block_tokens)  # and a token to answer with


def _tell_call(run: RequestRun, error: TandemError | None) -> None:
    if (call := run.terms.call) is not None:
        final = run.stream.final
        tokens = run.answer_tokens if final is None else final.usage.completion_tokens
        call.ended(run.lifecycle.state, None if error is None else error.code, tokens)
