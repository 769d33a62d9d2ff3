"""A router in virtual time: `router.requests.core` with simulated links, workers and timers.

Every decision is made by the router's own code. This module carries actions out and delivers the workers' messages.
"""

from __future__ import annotations

from functools import partial

from planner.simulator.cache_feed import CacheFeed
from planner.simulator.events import EventLoop
from planner.simulator.fleet import SimFleet
from planner.simulator.frame_handler import FrameHandler, request_of
from planner.simulator.measurements import RunMeasurements
from planner.simulator.requests import NullAssembler, SimRequest
from planner.simulator.sequence import SimSequence, TraceBlockHashes
from planner.simulator.setup import Setup
from planner.simulator.worker import SimWorker
from planner.traces.trace import TrafficTrace
from router.observe.pace_observer import PaceObserver
from router.policies.types import PlacementRules
from router.request_terms import RequestTerms
from router.requests import actions as act
from router.requests import events as ev
from router.requests.core import RequestCore
from router.requests.facts import Facts
from router.requests.output import TextPiece
from router.requests.state_machine import RequestRun
from tandem.config.model import Role
from tandem.errors import ContextExceeded, TandemError, WorkerLost
from tandem.scheduler.plan import ExportRange

PUMP_EVERY_S = 0.001


class SimCluster:
    """The core's `Carrier`, and the `WorkerHost` of its workers."""

    def __init__(
        self, trace: TrafficTrace, setup: Setup, rules: PlacementRules, loop: EventLoop, measurements: RunMeasurements
    ) -> None:
        self._trace, self._setup, self._loop, self._measurements = trace, setup, loop, measurements
        self._classes = {each.name for each in setup.router.classes}
        self._hashes = TraceBlockHashes(trace.prefixes, setup.block_tokens)
        self.fleet = SimFleet(setup, loop, self, measurements.intervals)
        self.cache = CacheFeed(loop, setup.router.index_memory_bytes, self.fleet)
        facts = Facts()
        measurements.subscribe(facts)
        PaceObserver(self.fleet).subscribe(facts)
        self.core = RequestCore(setup.router, rules, self.fleet, self.cache.mirror, loop, self, facts)
        self._workers = FrameHandler(setup, loop, self._hashes, self.fleet.cores, self._send_event, self._last_token_s)
        self._next_pump_s: float | None = None
        self._pumped_s = -PUMP_EVERY_S

    @property
    def active(self) -> int:
        return self.core.active

    def arrive(self, index: int) -> None:
        if (cores := self.fleet.cores) is None:
            self._submit(index)
        else:
            cores.spend(cores.host.request_s, partial(self._submit, index))

    def _submit(self, index: int) -> None:
        prompt = int(self._trace.prompt_tokens[index])
        name, tenant = self._trace.label_of(index)
        priority = name if name in self._classes else self._setup.router.classes[0].name
        hashes = self._hashes.of(index, prompt) if self._setup.caches else []
        output = int(self._trace.output_tokens[index])
        request = SimRequest(index, str(index), prompt, output, hashes, self._setup.block_tokens)
        terms, migrations = RequestTerms(priority, tenant), self._setup.router.max_migrations
        run = RequestRun(request, NullAssembler(), terms, self._loop.now_s(), migrations)
        if prompt >= self._setup.max_model_tokens:
            self.core.refuse(
                run, ContextExceeded(f"prompt: expected fewer than {self._setup.max_model_tokens} tokens, got {prompt}")
            )
            return
        try:
            self.core.submit(run)
        except TandemError:
            return  # the core has published its end
        self.pump()

    # --- time ----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        self._pumped_s = self._loop.now_s()
        due_s = self.core.pump()
        if due_s is not None:
            self._pump_at(due_s)

    def pump_soon(self) -> None:
        if len(self.core.queue):
            self._pump_at(self._loop.now_s())

    def _pump_at(self, at_s: float) -> None:
        at_s = max(at_s, self._pumped_s + PUMP_EVERY_S)
        if self._next_pump_s is None or at_s < self._next_pump_s:
            self._next_pump_s = at_s
            self._loop.call_at(at_s, self._pump_due, at_s)

    def _pump_due(self, at_s: float) -> None:
        if self._next_pump_s == at_s:
            self._next_pump_s = None
            self.pump()

    # --- the core's Carrier ----------------------------------------------------------------------------------------

    def send(self, run: RequestRun, frame: act.Frame) -> int | None:
        worker = self.fleet.find(frame.worker)
        if worker is None:
            return None
        if isinstance(frame, act.Opening):
            worker.attached[frame.wire_id] = run
        elif isinstance(frame, act.Leave):
            worker.attached.pop(frame.wire_id, None)
            if not frame.cancel:
                return worker.sent_frames
        worker.sent_frames += 1
        arrives_s = self._loop.now_s() + self._setup.network_s
        self._loop.call_at(arrives_s, worker.receive, worker.sent_frames, self._workers.take, run, frame, worker)
        return worker.sent_frames

    def emit(self, run: RequestRun, output: TextPiece | act.EmitPromptScores) -> bool:
        return True

    def ended(self, run: RequestRun, end: act.End) -> None:
        pass

    # --- the workers' events -----------------------------------------------------------------------------------------

    def _send_event(self, worker: SimWorker, wire_id: str, event: ev.Event) -> None:
        self._loop.call_at(self._loop.now_s() + self._setup.network_s, self._deliver, worker, wire_id, event)

    def _deliver(self, worker: SimWorker, wire_id: str, event: ev.Event) -> None:
        run = worker.attached.get(wire_id)
        if run is None or worker.lost:
            return
        if isinstance(event, ev.AttemptEnded):
            del worker.attached[wire_id]
        self.core.on(run, event)

    def first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        self._measurements.last_token_s[sequence.index] = self._loop.now_s() + self._setup.network_s
        self._workers.first_token(worker, sequence)

    def finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        self._measurements.last_token_s[sequence.index] = sequence.last_token_s + self._setup.network_s
        self._workers.finished(worker, sequence)

    def failed(self, worker: SimWorker, wire_id: str, error: TandemError) -> None:
        self._workers.failed(worker, wire_id, error)

    def export(self, worker: SimWorker, part: ExportRange, start_s: float, end_s: float) -> None:
        self._workers.export(worker, part, start_s, end_s)

    def paced(self, worker: SimWorker, batch: int, tokens: int, seconds: float) -> None:
        """Updates the decode pace here: the core sees a simulated request's tokens only at its end."""
        if worker.role is Role.DECODE:
            self.fleet.pace(Role.DECODE).decoded(batch, tokens, seconds)

    def changed(self, worker: SimWorker, *, room: bool) -> None:
        self.fleet.note(worker)
        self.cache.changed(worker)
        if room and len(self.core.queue):
            self._pump_at(self._loop.now_s() + self._setup.network_s)  # the report arrives with the step's tokens

    def _last_token_s(self, index: int) -> float:
        return float(self._measurements.last_token_s[index])

    # --- faults ------------------------------------------------------------------------------------------------------

    def lose_worker(self, worker_id: str, back_after_s: float | None) -> None:
        """Breaks the links to a worker. It comes back empty, with a new epoch, after `back_after_s`; None: never."""
        if (worker := self.fleet.workers.get(worker_id)) is None:
            return  # lost already
        self.fleet.lose(worker)
        self.cache.drop(worker.key)
        attached, worker.attached = list(worker.attached.items()), {}
        error = WorkerLost(f"{worker_id} was lost")
        for wire_id, run in attached:
            self._deliver_sent(worker, wire_id, run)
            self.core.on(run, ev.WorkerGone(worker.key, error))
        if back_after_s is not None:
            key = worker.key
            at_s = self._loop.now_s() + back_after_s
            self._loop.call_at(at_s, self._come_back, key.worker_id, worker.role, key.epoch + 1)

    def _deliver_sent(self, worker: SimWorker, wire_id: str, run: RequestRun) -> None:
        """Delivers the tokens that a lost worker had sent before."""
        sequence = worker.scheduler.sequences.get(wire_id)
        if run.decode != worker.key or not isinstance(sequence, SimSequence) or sequence.generated <= 1:
            return
        if run.answer_tokens:  # otherwise its first token was in flight and is lost
            left = request_of(run).output_tokens - run.answer_tokens
            self.core.on(run, ev.TokensSampled(worker.key, [0] * min(sequence.generated - 1, left - 1)))
            self._measurements.last_token_s[sequence.index] = sequence.last_token_s

    def _come_back(self, worker_id: str, role: Role, epoch: int) -> None:
        self.cache.load(self.fleet.start(worker_id, role, epoch))
        self.pump()

    def slow_link(self, worker_id: str, factor: float) -> None:
        """Divides the rate of a worker's links by `factor`; 1 restores it."""
        worker = self.fleet.workers.get(worker_id)
        if worker is not None:
            for port in (worker.egress, worker.ingress):
                port.slowdown = factor
