"""The request core with its observers and scripted workers, in virtual time: a `Cluster` without servers and sockets.

Fleet, accounts, policy, admission, metrics and traces are the router's own. Workers answer frames as `StubWorker` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvtransfer.causes import HandoffCause, HandoffFault
from planner.simulator.events import EventLoop
from router.dashboard.feed import Feed
from router.observe.metrics.requests import RouterMetrics
from router.observers import Observers
from router.policies.pace_estimates import Estimates
from router.policies.placement import named_policy
from router.prefix_index.mirror import PrefixMirror, WorkerKey
from router.request_terms import RequestTerms
from router.requests import actions as act
from router.requests import events as ev
from router.requests.core import RequestCore
from router.requests.facts import Facts
from router.requests.output import Final, TextPiece
from router.requests.protocols import Assembler
from router.requests.raw_request import ValidRequest
from router.requests.state_machine import RequestRun
from router.testing.scenario import TextlessAssembler
from router.testing.stub_worker import BLOCK_BYTES, BLOCK_TOKENS, RECEIVED, SENT, TOTAL_BLOCKS
from router.workers.fleet import Fleet, Worker
from router.workers.link import WorkerLink
from router.workers.load_account import Account
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.engine.api import Capability
from tandem.errors import KvExhausted, TandemError, WorkerLost
from tandem.images import PromptImage
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.kvcache.layout import blocks_for
from tandem.request import FinishReason, SamplingParams
from tandem.rpc.directory import WIRE_ROLE
from tandem.v1 import cluster_pb2, worker_pb2

MODEL = "tiny"
ALWAYS = RouterSpec(disaggregation=Disaggregation.ALWAYS)
LEAST_TIMER_S = 0.001  # as the dispatcher's


@dataclass(eq=False)
class Asked:
    """One request and what its client has got."""

    run: RequestRun
    pieces: list[TextPiece] = field(default_factory=list)
    end: act.End | None = None

    @property
    def tokens(self) -> list[int]:
        return list(self.run.answer)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def final(self) -> Final:
        assert self.end is not None
        assert self.end.final is not None, self.end.error
        return self.end.final

    @property
    def error(self) -> TandemError:
        assert self.end is not None
        assert self.end.error is not None
        return self.end.error


class CoreWorker:
    """One epoch of a worker. It computes one prompt after the other. Tests may change the attributes at any time."""

    def __init__(self, cluster: CoreCluster, worker: Worker) -> None:
        self.worker = worker
        self.key = worker.key
        self.received: list[tuple[str, str]] = []  # (frame, wire id)
        self.cancelled: list[str] = []  # wire ids
        self.runs: dict[str, RequestRun] = {}  # by wire id: requests that it has
        self.unanswered: frozenset[str] = frozenset()  # frames that it does not answer: "reserve", "join", ...
        self.refusals = 0  # so many reservations are refused
        self.failing_handoffs = 0  # so many joins end with handoff_failed
        self.failing_decodes = 0  # so many answers end with worker_lost after one token of this worker
        self.reports = True  # of its side of a handoff
        self.cached_tokens = 0
        self.reserve_s = self.prefill_s = self.handoff_s = self.token_s = 0.0
        self._cluster, self._loop = cluster, cluster.loop
        self._opened_s: dict[str, float] = {}
        self._computed_s = 0.0  # when it has computed all prompts

    def frames(self, kind: str) -> list[str]:
        """Wire ids of the received frames of one kind, in order."""
        return [wire_id for frame, wire_id in self.received if frame == kind]

    def lose(self) -> None:
        """Breaks its link."""
        self._cluster.fleet.health.set_up(self.key, is_up=False)
        self.worker.link.ready = False
        runs, self.runs = self.runs, {}
        error = WorkerLost(f"worker {self.key.worker_id} was lost", retry_after_s=1.0)
        for run in runs.values():
            self._cluster.core.on(run, ev.WorkerGone(self.key, error))
        self._cluster.pump()

    def take(self, run: RequestRun, frame: act.Frame) -> None:
        wire_id = frame.wire_id
        if isinstance(frame, act.Leave):
            if frame.cancel:
                self.cancelled.append(wire_id)
            self.runs.pop(wire_id, None)
            return
        kind = type(frame).__name__.lower()
        self.received.append((kind, wire_id))
        if isinstance(frame, act.Opening):
            self.runs[wire_id] = run
            self._opened_s[wire_id] = self._loop.now_s()
        if kind in self.unanswered:
            return
        match frame:
            case act.Reserve():
                self._reserve(wire_id)
            case act.Generate() | act.Prefill():
                self._computed_s = max(self._computed_s, self._loop.now_s()) + self.prefill_s
                self._loop.call_at(self._computed_s, self._first_token, wire_id, isinstance(frame, act.Generate))
            case act.Join():
                self._join(wire_id)
            case _:
                raise NotImplementedError(kind)

    def _reserve(self, wire_id: str) -> None:
        if self.refusals:
            self.refusals -= 1
            self._send(wire_id, ev.AttemptEnded(self.key, error=KvExhausted("no room")))
        else:
            self._send(wire_id, ev.Reserved(self.key, "ticket", self.cached_tokens), self.reserve_s)

    def _first_token(self, wire_id: str, goes_on: bool) -> None:
        if (run := self.runs.get(wire_id)) is None:
            return
        self._token(run, wire_id, self.cached_tokens)
        if goes_on:
            self._after_token(wire_id)
        elif self.reports:
            self._report(wire_id, worker_pb2.HandoffDone(request_id=wire_id, sent=SENT), None)

    def _join(self, wire_id: str) -> None:
        if self.failing_handoffs:
            self.failing_handoffs -= 1
            fault = HandoffFault(HandoffCause.DIGEST_MISMATCH, "corrupted")
            self._send(wire_id, ev.AttemptEnded(self.key, error=fault))
        else:
            self._loop.call_at(self._loop.now_s() + self.handoff_s, self._joined, wire_id)

    def _joined(self, wire_id: str) -> None:
        self._report(wire_id, worker_pb2.HandoffDone(request_id=wire_id, received=RECEIVED), 0.0)
        self._loop.call_at(self._loop.now_s() + self.token_s, self._decode, wire_id)

    def _report(self, wire_id: str, done: worker_pb2.HandoffDone, joined_ago_s: float | None) -> None:
        if (run := self.runs.get(wire_id)) is None:
            return
        age_s = self._loop.now_s() - self._opened_s[wire_id]
        done.blocks = blocks_for(run.prefill_tokens - 1 - self.cached_tokens, BLOCK_TOKENS)
        done.bytes, done.pieces = done.blocks * BLOCK_BYTES, done.blocks
        joined_after_s = None if joined_ago_s is None else age_s - joined_ago_s
        self._send(wire_id, ev.HandoffReported(self.key, wire_id, done.bytes, done.blocks, age_s, joined_after_s, done))

    def _decode(self, wire_id: str) -> None:
        if (run := self.runs.get(wire_id)) is None:
            return
        self._token(run, wire_id, 0)
        self._after_token(wire_id)

    def _after_token(self, wire_id: str) -> None:
        if (run := self.runs.get(wire_id)) is None:
            return
        sampling = run.request.sampling
        if self.failing_decodes:
            self.failing_decodes -= 1
            self._send(wire_id, ev.AttemptEnded(self.key, error=WorkerLost("lost")))
        elif run.answer[-1] in sampling.stop_token_ids:
            self._send(wire_id, ev.AttemptEnded(self.key, FinishReason.STOP))
        elif run.answer_tokens == min(sampling.max_tokens, len(self._cluster.answer)):
            self._send(wire_id, ev.AttemptEnded(self.key, FinishReason.LENGTH))
        else:
            self._loop.call_at(self._loop.now_s() + self.token_s, self._decode, wire_id)

    def _token(self, run: RequestRun, wire_id: str, cached_tokens: int) -> None:
        token_id = self._cluster.answer[run.answer_tokens]
        token = worker_pb2.StepToken(request_id=wire_id, token_id=token_id, cached_tokens=cached_tokens)
        if run.request.sampling.logprobs is not None:
            token.logprobs.token_id, token.logprobs.logprob = token_id, -0.5
        self._cluster.core.on(run, ev.TokenSampled(self.key, token))

    def _send(self, wire_id: str, event: ev.Event, after_s: float = 0.0) -> None:
        self._loop.call_at(self._loop.now_s() + after_s, self._deliver, wire_id, event)

    def _deliver(self, wire_id: str, event: ev.Event) -> None:
        """What it says about a request that left it is dropped, as on a link."""
        if (run := self.runs.get(wire_id)) is None:
            return
        if isinstance(event, ev.AttemptEnded):
            del self.runs[wire_id]
        self._cluster.core.on(run, event)


class CoreCluster:
    """The core's `Carrier`. `workers` are names: "p0" prefills, "d0" decodes. All answer every prompt with `answer`."""

    def __init__(self, *workers: str, spec: RouterSpec = ALWAYS, answer: Sequence[int] = (70, 71, 72, 73)) -> None:
        self.answer = answer
        self.spec = spec
        self.loop = EventLoop()
        self.fleet = Fleet("router-0", Estimates(self.loop))
        self.mirror = PrefixMirror(spec.index_memory_bytes)
        self.workers: dict[WorkerKey, CoreWorker] = {}
        facts = Facts()
        self.core = RequestCore(spec, named_policy(spec), self.fleet, self.mirror, self.loop, self, facts)
        self.metrics = RouterMetrics(CollectorRegistry(), frozenset({MODEL}))
        self.metrics.watch_core(self.core)
        self.metrics.watch_index(self.mirror, None)
        self.metrics.watch_classes(spec.classes)
        self.feed = Feed(self.loop)
        self.observers = Observers(facts, self.core, self.fleet, self.metrics, self.feed, spec.classes, None)
        self._asked: dict[RequestRun, Asked] = {}
        self._next_pump_s: float | None = None
        for name in workers:
            self.add(name)

    def add(self, name: str, epoch: int = 1, can: Iterable[Capability] = Capability) -> CoreWorker:
        """A worker joins, with its link up."""
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        info = cluster_pb2.WorkerInfo(
            worker_id=name, epoch=epoch, model=MODEL, role=WIRE_ROLE[role], total_blocks=TOTAL_BLOCKS,
            can=cluster_pb2.Capabilities(names=can),
        )  # fmt: skip
        link = WorkerLink(info, "router-0", self.fleet)
        link.ready = True
        worker = Worker(link, role, Account(), self.fleet.estimates.worker(MODEL, role))
        self.fleet._workers[link.key] = worker  # `set_directory` would connect
        self.fleet.health.add(link.key, MODEL, role)
        self.fleet.health.set_up(link.key, is_up=True)
        self.workers[link.key] = CoreWorker(self, worker)
        self.pump()
        return self.workers[link.key]

    def worker(self, name: str, epoch: int = 1) -> CoreWorker:
        return self.workers[WorkerKey(name, epoch)]

    # ---- clients

    def ask(
        self,
        prompt: int | Sequence[int] = 2,
        sampling: SamplingParams | None = None,
        terms: RequestTerms | None = None,
        assembler: Assembler | None = None,
        session: bytes | None = None,
        adapter: str = "",
        images: Sequence[PromptImage] = (),
    ) -> Asked:
        """Submits a request: a prompt of so many tokens, or of these. Raises as `RequestCore.submit` does."""
        tokens = tuple(prompt) if not isinstance(prompt, int) else (70,) * prompt
        request = ValidRequest(
            request_id=f"r{len(self._asked)}",
            model=MODEL,
            prompt=tokens,
            sampling=sampling or SamplingParams(max_tokens=len(self.answer)),
            stop=(),
            block_hashes=tuple(hash_blocks(tokens, BLOCK_TOKENS, HashKey("f", adapter))),
            block_tokens=BLOCK_TOKENS,
            session=session,
            adapter=adapter,
            images=tuple(images),
        )
        terms = terms or RequestTerms(self.spec.classes[0].name)
        run = RequestRun(request, assembler or TextlessAssembler(), terms, self.loop.now_s(), self.spec.max_migrations)
        asked = self._asked[run] = Asked(run)
        self.core.submit(run)
        if terms.deadline_s is not None:
            self.loop.call_at(terms.deadline_s, self.core.on, run, ev.Expired())
        self.pump()
        return asked

    def cancel(self, asked: Asked) -> None:
        self.core.on(asked.run, ev.Cancelled())

    # ---- time

    def run(self, seconds: float | None = None) -> None:
        """Until nothing happens any more, or for so long."""
        if seconds is None:
            self.loop.run(lambda: False)
            return
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = True

        self.loop.call_at(self.loop.now_s() + seconds, end)
        self.loop.run(lambda: is_over)

    def pump(self) -> None:
        if (due_s := self.core.pump()) is not None:
            self._pump_at(max(due_s, self.loop.now_s() + LEAST_TIMER_S))

    def pump_soon(self) -> None:
        self._pump_at(self.loop.now_s())

    def _pump_at(self, at_s: float) -> None:
        if self._next_pump_s is None or at_s < self._next_pump_s:
            self._next_pump_s = at_s
            self.loop.call_at(at_s, self._pump_due, at_s)

    def _pump_due(self, at_s: float) -> None:
        if self._next_pump_s == at_s:
            self._next_pump_s = None
            self.pump()

    # ---- the core's Carrier

    def send(self, run: RequestRun, frame: act.Frame) -> int | None:
        worker = self.workers.get(frame.worker)
        if worker is None or not worker.worker.link.ready:
            return None
        worker.worker.link.sent_frames += 1
        worker.take(run, frame)
        return worker.worker.link.sent_frames

    def emit(self, run: RequestRun, output: TextPiece | act.EmitPromptScores) -> bool:
        if isinstance(output, TextPiece):
            self._asked[run].pieces.append(output)
        return True

    def ended(self, run: RequestRun, end: act.End) -> None:
        assert self._asked[run].end is None, "a request ends once"
        self._asked[run].end = end

    # ---- what a test asks

    def metric(self, line_start: str) -> float:
        """Sum of the samples whose exposition line starts so."""
        lines = self.metrics.render().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))

    def ends(self, state: str) -> int:
        return sum(asked.end is not None and asked.end.state == state for asked in self._asked.values())

    def check_settled(self) -> None:
        """No request is anywhere, and nothing is charged to a worker."""
        assert self.core.active == 0
        assert not self.core.facts.failures
        for worker in self.workers.values():
            assert worker.worker.account == Account(), worker.key
            assert not worker.runs, worker.key
