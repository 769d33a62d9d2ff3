"""A worker with another engine than ours: leader, roles and handoffs use `tandem.engine.api.Engine` alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cluster.backends.rank_process import make_roles
from kvtransfer.control import (
    CloseReceive,
    CloseSend,
    OpenReceive,
    OpenSend,
    ReceiveClosed,
    Received,
    SendClosed,
    Sent,
)
from tandem.clock import SystemClock
from tandem.engine.api import Engine, StepResult
from tandem.engine.step_work import WorkShape
from tandem.scheduler.plan import ExportRange
from tandem.testing.small_engine import BLOCK_TOKENS, SmallEngine, answer_of, write_shift
from tandem.v1 import cluster_pb2, inference_pb2, worker_pb2
from worker.agents import Agents
from worker.inbox import AgentMessage, Inbox, Stop
from worker.io_thread import ServiceLink
from worker.leader import Leader, make_requests
from worker.messages import FromRouter, SessionClosed, SessionOpened, StateAnswer, StateQuery, ToRouter, WantedAdapters
from worker.meters import StepMeters
from worker.rank import RoleParts
from worker.roles import WorkerIdentity

SESSION = 1
TIMEOUT_S = 30.0
PROMPT = [5, 17, 80, 3, 44, 91, 2]


class Service(ServiceLink):
    """The worker's service, as a queue of the frames for its router."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[worker_pb2.WorkerFrame] = queue.SimpleQueue()
        self.states: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, ToRouter):
            self.frames.put(worker_pb2.WorkerFrame.FromString(message.frame))
        elif isinstance(message, StateAnswer):
            self.states.put(message.state)

    def flush(self) -> None:
        """Frames wait for nothing."""


@dataclass
class Agent:
    """Plays the transfer agent beside a worker's rank. Takes orders in the leader's thread, and copies blocks at once.
    Of two workers, each is the other's `peer`."""

    inbox: Inbox
    peer: Agent | None = None
    engine: SmallEngine | None = None
    to_send: dict[str, OpenSend] = field(default_factory=dict)  # by export id
    to_receive: dict[int, OpenReceive] = field(default_factory=dict)  # by number of prompt tokens
    pid = None

    def send(self, message: msgspec.Struct) -> None:
        match message:
            case OpenSend():
                self.to_send[message.export_id] = message
            case OpenReceive():
                self.to_receive[message.prompt_tokens] = message
            case CloseSend(ticket_id=ticket_id):
                self.inbox.put(AgentMessage(0, SendClosed(ticket_id)))
            case CloseReceive(ticket_id=ticket_id):
                self.inbox.put(AgentMessage(0, ReceiveClosed(ticket_id)))

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        """As the engine's KvExporter."""
        assert self.peer is not None
        assert self.engine is not None
        assert self.peer.engine is not None
        for told in ranges:
            order = self.to_send[told.request_id]
            opened = self.peer.to_receive[order.prompt_tokens]
            for source, target in zip(told.block_ids, opened.block_ids, strict=True):
                self.peer.engine.kv[target][:] = self.engine.kv[source]
            self.peer.inbox.put(AgentMessage(0, Received(opened.ticket_id, 1, len(told.block_ids), 1, 0.0)))
            self.inbox.put(AgentMessage(0, Sent(order.ticket_id, 1, 1)))

    def layer_done(self, layer: int) -> None:
        """The engine has one layer."""


class Worker:
    """One worker's leader in a thread of its own. `router` is the only session's other end."""

    def __init__(self, name: str, blocks: int = 32) -> None:
        self.inbox, self.service = Inbox(), Service()
        self.agent = Agent(self.inbox)
        self.engine = SmallEngine(blocks, self.agent)
        self.agent.engine = self.engine
        engine: Engine = self.engine
        identity = WorkerIdentity(name, 1, 1, "model", BLOCK_TOKENS, bytes(32))
        requests, agents = make_requests(self.service), Agents([self.agent], SystemClock())
        launch = cast(Any, SimpleNamespace(transfer=SimpleNamespace(ticket_ttl_s=60.0)))
        roles = make_roles(RoleParts(launch, identity, engine, agents, requests))
        meters = StepMeters(WorkShape(1, 1, 1, 1.0, 1.0), peak_flops_per_s=1.0, peak_memory_bytes_per_s=1.0)
        info = cluster_pb2.WorkerInfo(worker_id=name, epoch=1)
        self._leader = Leader(identity, info, engine, agents, requests, roles, self.inbox, self.service, meters)
        self._thread = threading.Thread(target=self._leader.run, daemon=True)
        self._thread.start()
        self.inbox.put(SessionOpened(SESSION, "router"))

    def send(self, **frame: Any) -> None:
        self.inbox.put(FromRouter(SESSION, worker_pb2.RouterFrame(**frame).SerializeToString()))

    def frames(self) -> Iterator[worker_pb2.WorkerFrame]:
        while True:
            yield self.service.frames.get(timeout=TIMEOUT_S)

    def tokens_until_end(self) -> tuple[list[int], worker_pb2.Ended]:
        tokens: list[int] = []
        for frame in self.frames():
            tokens += [each.token_id for each in frame.tokens]
            if frame.ended:
                return tokens, frame.ended[0]
        raise AssertionError

    def stop(self) -> None:
        self.inbox.put(Stop("the test is over"))
        self._thread.join(TIMEOUT_S)

    def check_at_rest(self) -> None:
        assert not self._thread.is_alive()
        blocks = self.engine.load().blocks
        assert blocks.conserved
        assert blocks.free == blocks.total


def work(name: str, tokens: int, **sampling: Any) -> worker_pb2.Work:
    return worker_pb2.Work(
        request_id=name, prompt=PROMPT, sampling=worker_pb2.ResolvedSampling(max_tokens=tokens, top_p=1.0, **sampling)
    )


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    prefill, decode = Worker("prefill-0"), Worker("decode-0")
    prefill.agent.peer, decode.agent.peer = decode.agent, prefill.agent
    try:
        yield prefill, decode
    finally:
        prefill.stop()
        decode.stop()
    prefill.check_at_rest()
    decode.check_at_rest()


def test_another_engine_answers(workers: tuple[Worker, Worker]) -> None:
    _, decode = workers
    decode.send(generate=worker_pb2.Generate(work=work("r", 9)))
    tokens, ended = decode.tokens_until_end()
    assert tokens == answer_of(PROMPT, 9)
    assert ended.finish_reason == inference_pb2.FINISH_REASON_LENGTH


def test_another_engines_blocks_are_handed_off(workers: tuple[Worker, Worker]) -> None:
    prefill, decode = workers
    reserve = worker_pb2.Reserve(work=work("r", 9), prefill_worker="prefill-0", prefill_epoch=1, use_prefix_cache=True)
    decode.send(reserve=reserve)
    ticket = next(frame.reserved[0].ticket for frame in decode.frames() if frame.reserved)
    prefill.send(prefill=worker_pb2.Prefill(work=work("r", 9), ticket=ticket))
    first = next(frame.tokens[0].token_id for frame in prefill.frames() if frame.tokens)
    decode.send(join=worker_pb2.Join(request_id="r", first_token=first))
    rest, ended = decode.tokens_until_end()
    assert [first, *rest] == answer_of(PROMPT, 9)
    assert ended.finish_reason == inference_pb2.FINISH_REASON_LENGTH


def test_what_an_engine_cannot_do_is_refused_by_name(workers: tuple[Worker, Worker]) -> None:
    _, decode = workers
    decode.send(generate=worker_pb2.Generate(work=work("r", 4, grammar="{}")))
    _, ended = decode.tokens_until_end()
    assert (ended.error.code, "grammars" in ended.error.message) == ("unsupported_field", True)


def test_an_answer_that_cannot_be_moved_stays_where_it_is(workers: tuple[Worker, Worker]) -> None:
    _, decode = workers
    step, steps, asked = decode.engine.step, count(), list[str]()

    def step_and_ask() -> StepResult:
        if next(steps) == 2:  # it decodes; the frame is read before the next step
            decode.send(hold=worker_pb2.Hold(request_id="r"))
        return step()

    def hold(request_id: str) -> bool:
        asked.append(request_id)
        return SmallEngine.hold(decode.engine, request_id)

    decode.engine.step, decode.engine.hold = step_and_ask, hold  # type: ignore[method-assign]
    decode.send(generate=worker_pb2.Generate(work=work("r", 9)))
    held: list[bool] = []
    tokens: list[int] = []
    for frame in decode.frames():
        held += [each.held for each in frame.held]
        tokens += [each.token_id for each in frame.tokens]
        if frame.ended:
            break
    assert (len(asked), held, tokens) == (1, [False], answer_of(PROMPT, 9))


@pytest.mark.parametrize("asked", ["hold", "resume"])
def test_a_router_hears_that_a_request_is_not_there_any_more(workers: tuple[Worker, Worker], asked: str) -> None:
    """It was sent to another worker that failed then, and only its router can start it again."""
    _, decode = workers
    frame = {"hold": worker_pb2.Hold(request_id="r"), "resume": worker_pb2.Resume(request_id="r")}[asked]
    decode.send(**{asked: frame})
    tokens, ended = decode.tokens_until_end()
    assert (tokens, ended.request_id, ended.error.code) == ([], "r", "unavailable")


def test_what_a_session_sent_before_its_end_starts_nothing_after_it(workers: tuple[Worker, Worker]) -> None:
    """Its router does not cancel it any more, so it would hold its blocks for good."""
    _, decode = workers
    decode.inbox.put(SessionClosed(SESSION))
    decode.send(reserve=worker_pb2.Reserve(work=work("r", 9), prefill_worker="prefill-0", prefill_epoch=1))
    decode.inbox.put(SessionOpened(SESSION + 1, "router"))
    other = worker_pb2.RouterFrame(generate=worker_pb2.Generate(work=work("other", 3)))
    decode.inbox.put(FromRouter(SESSION + 1, other.SerializeToString()))
    tokens, _ = decode.tokens_until_end()
    assert tokens == answer_of(PROMPT, 3)
    assert decode.engine.load().reserved_requests == 0


def test_a_cancelled_reservation_frees_its_blocks_once_no_agent_writes_to_them(workers: tuple[Worker, Worker]) -> None:
    _, decode = workers
    reserve = worker_pb2.Reserve(work=work("r", 9), prefill_worker="prefill-0", prefill_epoch=1)
    decode.send(reserve=reserve)
    next(frame for frame in decode.frames() if frame.reserved)
    assert decode.engine.load().blocks.leased
    decode.send(cancel=worker_pb2.Cancel(request_id="r"))
    _, ended = decode.tokens_until_end()
    assert ended.error.code == "cancelled"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of copies."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def test_a_worker_answers_with_the_adapters_that_the_directory_has(
    workers: tuple[Worker, Worker], tmp_path: Path
) -> None:
    _, decode = workers
    one, two = write_shift(tmp_path / "one", 11), write_shift(tmp_path / "two", 30)
    decode.inbox.put(WantedAdapters((one, two)))
    told = (frame.adapters for frame in decode.frames() if frame.HasField("adapters"))
    next(each for each in told if len(each.fingerprints) == 2)
    for files, shift in ((one, 11), (two, 30)):
        asked = work(files.fingerprint, 9)
        asked.adapter = files.fingerprint
        decode.send(generate=worker_pb2.Generate(work=asked))
        tokens, _ = decode.tokens_until_end()
        assert tokens == answer_of(PROMPT, 9, shift)


def test_a_request_for_an_adapter_that_a_worker_has_not_may_try_another(workers: tuple[Worker, Worker]) -> None:
    _, decode = workers
    asked = work("r", 4)
    asked.adapter = "unknown"
    decode.send(generate=worker_pb2.Generate(work=asked))
    _, ended = decode.tokens_until_end()
    assert (ended.error.code, ended.error.field) == ("unavailable", "adapter")


def test_an_adapter_that_cannot_be_loaded_is_named_in_the_workers_state(
    workers: tuple[Worker, Worker], tmp_path: Path
) -> None:
    _, decode = workers
    broken, good = write_shift(tmp_path / "broken", None), write_shift(tmp_path / "good", 5)
    decode.inbox.put(WantedAdapters((broken, good)))  # copied in this order
    told = (frame.adapters for frame in decode.frames() if frame.HasField("adapters"))
    next(each for each in told if list(each.fingerprints) == [good.fingerprint])
    decode.inbox.put(StateQuery(1))
    state = worker_pb2.WorkerState.FromString(decode.service.states.get(timeout=TIMEOUT_S))
    assert list(state.adapters.fingerprints) == [good.fingerprint]
    assert list(state.failed_adapters) == [broken.fingerprint]
    assert "expected a number as its shift" in state.failed_adapters[broken.fingerprint]


def test_a_leader_that_stops_leaves_no_thread(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    worker = Worker("decode-0")
    worker.inbox.put(WantedAdapters((write_shift(tmp_path / "one", 11),)))
    next(frame for frame in worker.frames() if frame.adapters.fingerprints)
    worker.stop()
    begun = {*threading.enumerate()} - before
    for thread in begun:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in begun)
