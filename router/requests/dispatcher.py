"""Carries out what `router.requests.core` decides: frames over gRPC links, answers to their readers, timers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from router.admission.request_queue import RequestQueue
from router.policies.placement import PlacementPolicy
from router.prefix_index.mirror import PrefixMirror
from router.request_terms import RequestTerms
from router.requests import actions as act
from router.requests import events as ev
from router.requests.core import RequestCore
from router.requests.facts import Facts
from router.requests.output import OutputAssembler, ResponseStream, TextPiece
from router.requests.raw_request import ValidRequest
from router.requests.recording.recorder import Recorder
from router.requests.run_on_links import RunOnLinks
from router.requests.serving_model import ServingModel
from router.requests.state_machine import RequestRun
from router.workers.fleet import Fleet
from tandem.clock import Clock
from tandem.config.router import RouterSpec
from tandem.errors import TandemError, UnavailableError

log = logging.getLogger(__name__)

CANCELLED_DRAIN_S = 0.2
DRAIN_POLL_S = 0.05
LEAST_TIMER_S = 0.001
PLACEMENTS_AT_ONCE = 8  # between two turns of the event loop: 1 to 3 ms


class Dispatcher:
    """Runs on the event loop's thread; nothing in it waits. The core's `Carrier`."""

    def __init__(
        self,
        *,
        spec: RouterSpec,
        fleet: Fleet,
        mirror: PrefixMirror,
        policy: PlacementPolicy,
        facts: Facts,
        clock: Clock,
        recorder: Recorder | None = None,
    ) -> None:
        self.fleet = fleet
        self.draining = False
        self.core = RequestCore(spec, policy, fleet, mirror, clock, self, facts, recorder)
        self._clock = clock
        self._is_recorded = recorder is not None
        self._max_migrations = spec.max_migrations
        self._default_terms = RequestTerms(spec.classes[0].name)
        self._on_links: dict[RequestRun, RunOnLinks] = {}
        self._deadlines: dict[RequestRun, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_pump_due = False
        self._is_closed = False

    @property
    def queue(self) -> RequestQueue[RequestRun]:
        return self.core.queue

    @property
    def active(self) -> int:
        """Requests that wait or are on workers."""
        return self.core.active

    def submit(self, model: ServingModel, request: ValidRequest, terms: RequestTerms | None = None) -> ResponseStream:
        """Queues a request and returns the stream of its answer.

        Raises OverloadedError, UnavailableError, DeadlineExceeded.
        """
        terms = terms or self._default_terms
        decoder = model.tokenizer if request.reading is None else request.reading.decoder
        assembler = OutputAssembler(decoder, request.prompt, request.stop, request.sampling.stop_token_ids)
        run = RequestRun(request, assembler, terms, self._clock.now_s(), self._max_migrations)
        stream = ResponseStream(request.request_id, lambda: self.core.on(run, ev.Cancelled()))
        self._on_links[run] = RunOnLinks(
            run, request, stream, self.core, self.fleet.link, is_recorded=self._is_recorded
        )
        if self.draining:
            error = UnavailableError("the router is shutting down; retry elsewhere", retry_after_s=1.0)
            self.core.refuse(run, error)
            raise error
        self._watch_deadline(run)
        try:
            self.core.submit(run)
        except TandemError:
            del stream  # it has the error, whose traceback has this frame: only the collector would free them
            raise
        if not self._is_pump_due:
            self.pump()
        return stream

    def pump(self) -> None:
        """Places what can be placed now. Called whenever a worker, a request or the clock has changed something."""
        self.fleet.sweep()
        self._set_timer(self.core.pump(PLACEMENTS_AT_ONCE))

    def pump_waiting(self) -> None:
        """A worker may have room now: pumps if a request waits."""
        if len(self.core.queue):
            self.pump()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits up to `timeout_s` for those there are."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.active:  # noqa: ASYNC110  # requests end in many ways; this runs once, at shutdown
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Refuses new requests and ends those there are, with an error that says why."""
        self.draining = self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        rest = [*self.core.running(), *self.core.waiting()]
        for run in rest:
            message = "the router stopped before the answer was complete; a retry may succeed"
            self.core.on(run, ev.Rejected(UnavailableError(message, retry_after_s=1.0)))
        if rest:
            log.warning("requests were cut off by the stop", extra={"requests": len(rest)})
            await asyncio.sleep(CANCELLED_DRAIN_S)  # cancels go out
        await self.fleet.close()

    def running(self) -> list[RequestRun]:
        """Those on workers."""
        return self.core.running()

    def waiting(self) -> Iterable[RequestRun]:
        return self.core.waiting()

    # ---- the core's Carrier

    def send(self, run: RequestRun, frame: act.Frame) -> int | None:
        return self._on_links[run].send(frame)

    def emit(self, run: RequestRun, output: TextPiece | act.EmitPromptScores) -> bool:
        stream = self._on_links[run].stream
        if stream is None:
            return True
        if isinstance(output, TextPiece):
            return stream.put(output)
        stream.prompt_scores = tuple(output.tokens)  # type: ignore[arg-type]  # as `RunOnLinks.on_prompt_scores` got them
        return True

    def ended(self, run: RequestRun, end: act.End) -> None:
        on_links = self._on_links.pop(run)
        if (timer := self._deadlines.pop(run, None)) is not None:
            timer.cancel()
        if on_links.stream is None:
            return
        if end.final is not None:
            on_links.stream.finish(end.final, run.stop_string)
        elif end.error is not None:
            on_links.stream.fail(end.error)

    def pump_soon(self) -> None:
        """Once for all that comes in one turn of the event loop, and not at once: a frame may have more events."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    # ---- time

    def _pump_now(self) -> None:
        self._is_pump_due = False
        self.pump()

    def _watch_deadline(self, run: RequestRun) -> None:
        if run.terms.deadline_s is not None:
            left_s = max(0.0, run.terms.deadline_s - self._clock.now_s())
            loop = asyncio.get_running_loop()
            self._deadlines[run] = loop.call_later(left_s, self.core.on, run, ev.Expired())

    def _set_timer(self, due_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None and not self._is_closed:
            delay_s = max(LEAST_TIMER_S, due_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.pump)
