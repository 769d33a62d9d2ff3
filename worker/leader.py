"""The leader's loop: handle events, run one engine step, send the results.

One thread, no locks; the loop blocks on the inbox only.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from google.protobuf.message import DecodeError

from kvtransfer.control import Attached, FromAgent, SetPeers
from tandem.clock import SystemClock
from tandem.engine.api import Engine, EngineLoad, StepResult
from tandem.errors import InputError, RequestFailed, TandemError, WorkerLost
from tandem.images import ExpandedPrompt
from tandem.v1 import cluster_pb2, worker_pb2
from worker.agents import Agents, peer_changes
from worker.image_reading import ImageReading, ReadingThread
from worker.inbox import (
    AdapterCopied,
    AgentConnected,
    AgentLost,
    AgentMessage,
    AgentStuck,
    ImagesRead,
    Inbox,
    LeaderEvent,
    Stop,
)
from worker.io_thread import ServiceLink
from worker.loaded_adapters import LoadedAdapters
from worker.messages import (
    CacheChanged,
    Computing,
    FromRouter,
    LeaderReady,
    Peers,
    SessionClosed,
    SessionOpened,
    StateAnswer,
    StateQuery,
    WantedAdapters,
)
from worker.meters import StepMeters
from worker.requests import BUGS, Outbox, RequestBook, report_step
from worker.roles import RoleSet, WorkerIdentity
from worker.wire import expanded_frame, load_frame, reach_frame

log = logging.getLogger(__name__)

IDLE_TICK_S = 1.0


class Leader:
    def __init__(
        self,
        identity: WorkerIdentity,
        info: cluster_pb2.WorkerInfo,
        engine: Engine,
        agents: Agents,
        requests: RequestBook,
        roles: RoleSet,
        inbox: Inbox,
        service: ServiceLink,
        meters: StepMeters,
    ) -> None:
        self._identity = identity
        self._info = info
        self._engine = engine
        self._agents = agents
        self._requests = requests
        self._roles = roles
        self._inbox = inbox
        self._service = service
        self._meters = meters
        self._sent_meters = worker_pb2.WorkerMeters()
        self._peers = SetPeers(())
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._adapters = LoadedAdapters(engine, SystemClock(), self._copying, inbox.put)
        self._copied: deque[AdapterCopied] = deque()
        self._images = ImageReading(engine, ReadingThread(), inbox.put)
        self._steps = 0
        self._ticked_s = 0.0
        engine.report_layers(self._report_computing)

    def run(self) -> str:
        """Runs until a Stop event. Returns its reason."""
        try:
            return self._run()
        finally:
            self._images.close()
            self._copying.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> str:
        while True:
            collecting_s = self._engine.collect()
            busy = self._engine.has_work
            idle_s = IDLE_TICK_S if collecting_s is None else min(IDLE_TICK_S, collecting_s)
            for event in self._inbox.drain() if busy or self._copied else self._inbox.wait(idle_s):
                if isinstance(event, Stop):
                    return event.reason
                self._handle(event)
            if self._copied:
                self._load_adapter(self._copied.popleft())
            self._tick()
            if collecting_s is not None or self._engine.is_collecting:
                self._report_collecting(self._requests.busy_sessions())
            self._flush()  # replies must not wait for the step
            if self._engine.has_work:
                self._step()
                self._flush()

    def _step(self) -> None:
        began_s = time.monotonic()
        result: StepResult = self._engine.step()
        ended_s = time.monotonic()
        self._meters.stepped(result.work, ended_s - began_s)
        self._steps += 1
        self._roles.after_step(result.ended, report_step(result, self._requests, began_s, ended_s))

    def _report_computing(self) -> None:
        if self._requests.outbox.report_computing(self._busy_sessions):
            self._agents.still_computing()
            self._service.send(Computing())
            self._service.flush()

    def _report_collecting(self, sessions: Iterable[int]) -> None:
        """Otherwise routers would take a worker that collects a batch, or reads images, for one that hangs."""
        for session in sessions:
            self._requests.outbox.frame(session).computing = True

    def _tick(self) -> None:
        now_s = time.monotonic()
        if (passed_s := now_s - self._ticked_s) >= IDLE_TICK_S:
            self._ticked_s = now_s
            self._images.tick(passed_s)
            self._engine.idle_tick()
            self._roles.tick()
            self._send_meters()
            if self._engine.has_work:
                self._agents.still_computing()
            if self._images.sessions():
                self._report_collecting(self._busy_sessions())
            if self._adapters.tick():
                self._report_adapters()
            for rank, pid in self._agents.unresponsive():
                log.error("the transfer agent of rank %d (pid %d) does not answer: killing it", rank, pid)
                with suppress(ProcessLookupError):  # still connected, so the process id was not reused
                    os.kill(pid, signal.SIGKILL)

    def _send_meters(self) -> None:
        meters = self._meters.frame(self._engine.preemptions, self._engine.load().host, self._agents.links())
        if meters != self._sent_meters:
            self._sent_meters = meters
            for session in self._requests.sessions:
                self._requests.outbox.frame(session).meters.CopyFrom(meters)

    def _load_adapter(self, copied: AdapterCopied) -> None:
        """One between two steps: the other ranks and the routers hear of this one after each."""
        if self._adapters.copied(copied):
            self._report_adapters()
        self._engine.idle_tick()

    def _report_adapters(self) -> None:
        for session in self._requests.sessions:
            self._requests.outbox.frame(session).adapters.CopyFrom(self._adapters.frame())

    def _flush(self) -> None:
        for change in self._engine.take_cache_events():
            self._service.send(CacheChanged(change.stored, b"".join(change.hashes)))
        requests = self._requests
        requests.outbox.flush(self._load(), self._steps, self._agents.reach(), requests.sessions, self._busy_sessions)
        self._service.flush()

    def _load(self) -> EngineLoad:
        load, (reading, tokens, reserves) = self._engine.load(), self._images.load()
        if reading or reserves:
            load = replace(
                load,
                waiting_requests=load.waiting_requests + reading,
                waiting_tokens=load.waiting_tokens + tokens,
                reserved_requests=load.reserved_requests + reserves,
            )
        return load

    def _busy_sessions(self) -> set[int]:
        return self._requests.busy_sessions() | self._images.sessions()

    def _handle(self, event: LeaderEvent) -> None:
        match event:
            case FromRouter(session=session, frame=frame):
                self._on_message(session, frame)
            case AgentMessage(rank=rank, message=message):
                self._on_agent_message(rank, message)
            case AgentLost(rank=rank):
                log.warning("lost the transfer agent of rank %d", rank)
                self._agents.lost(rank)
                self._roles.on_agent_lost(rank)
            case AgentStuck(rank=rank, pid=pid):
                raise WorkerLost(
                    f"the transfer agent of rank {rank} (pid {pid}) was killed and does not end, so it may still write "
                    "to KV blocks: this worker ends, and starts again with other memory"
                )
            case AgentConnected(rank=rank):
                self._agents.connected(rank)
                self._agents.send(rank, self._peers)
            case Peers(peers=peers):
                change, self._peers = peer_changes(self._peers.peers, peers), SetPeers(peers)
                self._agents.forget_all_but({(peer.worker_id, peer.epoch) for peer in peers})
                if change.changed or change.gone:
                    self._agents.broadcast(change)
            case WantedAdapters(adapters=adapters):
                self._adapters.want(adapters)
            case AdapterCopied():
                self._copied.append(event)
            case ImagesRead():
                self._on_images(event)
            case SessionOpened(session=session, router_id=router_id):
                self._requests.sessions[session] = router_id
                first = self._requests.outbox.frame(session)
                first.load.CopyFrom(load_frame(self._load(), self._steps))
                first.reach.CopyFrom(reach_frame(self._agents.reach()))
                first.meters.CopyFrom(self._sent_meters)
                first.adapters.CopyFrom(self._adapters.frame())
            case SessionClosed(session=session):
                self._requests.sessions.pop(session, None)
                self._requests.outbox.drop(session)
                self._images.drop(session)
                self._roles.on_session_closed(session)
            case StateQuery(query=query):
                self._service.send(StateAnswer(query, self._state().SerializeToString()))

    def _on_agent_message(self, rank: int, message: FromAgent) -> None:
        """A bad message fails the request of its handoff, never the worker."""
        try:
            self._agents.on_message(rank, message)
            if isinstance(message, Attached):
                self._update_agent(rank, message)
        except BUGS:
            log.exception("a transfer agent's message could not be handled", extra={"rank": rank})
        self._roles.on_agent(rank, message)

    def _update_agent(self, rank: int, attached: Attached) -> None:
        """A replaced agent listens at another address: the service then registers the worker again."""
        self._info.agents[rank].CopyFrom(agent_endpoint(rank, attached))
        self._service.send(LeaderReady(self._info.SerializeToString()))

    def _on_message(self, session: int, raw: bytes) -> None:
        if session not in self._requests.sessions:
            return  # the service ended it, and its router sends no cancel any more
        try:
            first = worker_pb2.RouterFrame.FromString(raw)
        except DecodeError as error:
            self._requests.outbox.count_frame(session)
            self._requests.refuse(session, "", InputError(f"frame: expected a RouterFrame: {error}"))
            return
        for frame in (first, *first.more):
            self._on_frame(session, frame)

    def _on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """A bad frame fails its own request, never the worker."""
        self._requests.outbox.count_frame(session)
        request_id = _request_id(frame)
        try:
            if self._images.takes(session, request_id, frame):
                return
        except TandemError as error:
            self._requests.refuse(session, request_id, error)
            return
        self._take_up(session, frame)

    def _on_images(self, result: ImagesRead) -> None:
        frames, read = self._images.read(result), result.result
        session, request_id = result.session, result.request_id
        if frames is None:
            return
        if isinstance(read, ExpandedPrompt) or (isinstance(read, TandemError) and not frames):
            self._requests.outbox.frame(session).expanded.append(expanded_frame(request_id, read))
        elif isinstance(read, TandemError):
            self._requests.refuse(session, request_id, read)
        else:
            for frame in frames:  # `result` keeps what was read until the engine has it
                self._take_up(session, frame)

    def _take_up(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        try:
            self._roles.on_frame(session, frame)
        except TandemError as error:
            self._requests.refuse(session, _request_id(frame), error)
        except BUGS as error:
            log.exception("a router's frame could not be handled")
            request_id, typed = _request_id(frame), RequestFailed.by(error)
            if not self._roles.end(session, request_id, typed):
                self._requests.refuse(session, request_id, typed)

    def _state(self) -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState(
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            load=load_frame(self._load(), self._steps),
            steps=self._steps,
            links=self._agents.links(),
            request_ends={state.value: number for state, number in self._requests.ends.items()},
            handoff_failures={cause.value: number for cause, number in self._requests.handoff_failures.items()},
            adapters=self._adapters.frame(),
            failed_adapters=self._adapters.failed,
        )


def _request_id(frame: worker_pb2.RouterFrame) -> str:
    match frame.WhichOneof("frame"):
        case "generate":
            return frame.generate.work.request_id
        case "reserve":
            return frame.reserve.work.request_id
        case "prefill":
            return frame.prefill.work.request_id
        case "join":
            return frame.join.request_id
        case "cancel":
            return frame.cancel.request_id
        case "expand_images":
            return frame.expand_images.request_id
        case _:
            return ""


def agent_endpoint(rank: int, attached: Attached) -> cluster_pb2.AgentEndpoint:
    return cluster_pb2.AgentEndpoint(
        rank=rank,
        host_id=attached.host_id,
        mapped_path=attached.mapped_path,
        tcp_address=attached.tcp_address,
        device=attached.device,
        machine_id=attached.machine_id,
        transports=attached.transports,
    )


def make_requests(service: ServiceLink) -> RequestBook:
    return RequestBook(Outbox(service.send_frame))
