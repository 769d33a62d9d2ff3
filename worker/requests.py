"""Who asked for what: the requests of one worker, by router session, and the frames that go back.

The engine names a request by an id made here, so a second attempt under the same request id never meets what is left
of the first.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from kvtransfer.causes import HandoffCause, HandoffFault
from tandem.clock import Clock, SystemClock
from tandem.engine.api import EngineLoad
from tandem.errors import ErrorCode, InputError, RequestCancelled, TandemError
from tandem.request import FinishReason, RequestState
from tandem.v1 import worker_pb2
from worker.wire import FINISH_REASONS, error_frame, load_frame, reach_frame

Life = tuple[str, int]
SendFrame = Callable[[int, bytes], None]

log = logging.getLogger(__name__)

MAX_TRACE_ID_CHARS = 32
_REFUSALS = frozenset({ErrorCode.KV_EXHAUSTED, ErrorCode.UNAVAILABLE})  # with too much to do, most of what is said
PROGRESS_REPORT_S = 1.0  # the load is told again after this, to routers that have a request here


@dataclass(frozen=True, slots=True)
class Client:
    """Where a request came from."""

    session: int
    request_id: str


class Outbox:
    """Gathers what one step has to say into one frame per router session."""

    def __init__(self, send: SendFrame, clock: Clock | None = None) -> None:
        self._send = send
        self._clock = clock or SystemClock()
        self._frames: defaultdict[int, worker_pb2.WorkerFrame] = defaultdict(worker_pb2.WorkerFrame)
        self._told_load: EngineLoad | None = None
        self._told_load_at_s = 0.0
        self._told_reach: frozenset[Life] = frozenset()
        self._seen: Counter[int] = Counter()  # frames of each session

    def frame(self, session: int) -> worker_pb2.WorkerFrame:
        return self._frames[session]

    def drop(self, session: int) -> None:
        self._frames.pop(session, None)
        del self._seen[session]

    def saw_frame(self, session: int) -> None:
        """A frame of the session is taken up: its router is told with the next flush, in any case."""
        self._seen[session] += 1
        self.frame(session)

    def flush(
        self,
        load: EngineLoad,
        steps: int,
        reach: frozenset[Life],
        sessions: Iterable[int],
        busy_sessions: Callable[[], Iterable[int]],
    ) -> None:
        """Sends every pending frame. Load and reach ride along, and go to all sessions whenever they changed; to those
        with requests here the load goes once a second in any case, as the sign that the step loop goes on."""
        now_s = self._clock.now_s()
        told: Iterable[int] = ()
        if load != self._told_load:
            told = sessions
        elif now_s - self._told_load_at_s >= PROGRESS_REPORT_S:
            told = busy_sessions()
        if told:
            self._told_load, self._told_load_at_s = load, now_s
            wire = load_frame(load, steps)
            for session in told:
                self._frames[session].load.CopyFrom(wire)
        if reach != self._told_reach:
            self._told_reach = reach
            for session in sessions:
                self._frames[session].reach.CopyFrom(reach_frame(reach))
        for session, frame in self._frames.items():
            frame.sent_at_s = now_s
            frame.frames_seen = self._seen[session]
            self._send(session, frame.SerializeToString())
        self._frames.clear()


class RequestBook:
    """The live requests of this worker. Every one leaves through `finish`, `fail` or `close`, exactly once."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.ends: Counter[RequestState] = Counter()
        self.handoff_failures: Counter[HandoffCause] = Counter()
        self.sessions: dict[int, str] = {}
        self._ids = count(1)
        self._clients: dict[str, Client] = {}
        self._engine_ids: dict[Client, str] = {}
        self._trace_ids: dict[str, str] = {}  # of those that have one
        self._computing: dict[str, float] = {}  # since when, of those whose prompt was begun

    def open(self, session: int, request_id: str, trace_id: str = "") -> str:
        """The engine's id for a new request; `trace_id` is for the logs. Raises InputError when the session already has
        one of that name."""
        client = Client(session, request_id)
        if not request_id or client in self._engine_ids:
            raise InputError("request_id: expected a new, non-empty id", field="request_id")
        engine_id = f"{next(self._ids)}:{request_id}"
        self._clients[engine_id] = client
        self._engine_ids[client] = engine_id
        if trace_id:
            self._trace_ids[engine_id] = trace_id[:MAX_TRACE_ID_CHARS]
        return engine_id

    def find(self, session: int, request_id: str) -> str | None:
        return self._engine_ids.get(Client(session, request_id))

    def client(self, engine_id: str) -> Client | None:
        return self._clients.get(engine_id)

    def of_session(self, session: int) -> list[str]:
        return [engine_id for engine_id, client in self._clients.items() if client.session == session]

    def busy_sessions(self) -> set[int]:
        """Those with a live request."""
        return {client.session for client in self._clients.values()} & self.sessions.keys()

    def frame_of(self, engine_id: str) -> tuple[worker_pb2.WorkerFrame, str] | None:
        """The frame to add to and the router's id, or None when the router no longer wants to hear of it."""
        client = self._clients.get(engine_id)
        if client is None or client.session not in self.sessions:
            return None
        return self.outbox.frame(client.session), client.request_id

    def computing(self, engine_id: str, since_s: float) -> None:
        """The first step with its prompt began then."""
        if engine_id in self._clients:
            self._computing[engine_id] = since_s

    def computing_since_s(self, engine_id: str) -> float | None:
        return self._computing.get(engine_id)

    def finish(self, engine_id: str, reason: FinishReason) -> None:
        if target := self.frame_of(engine_id):
            frame, request_id = target
            frame.ended.add(request_id=request_id, finish_reason=FINISH_REASONS[reason])
        self.close(engine_id, RequestState.FINISHED)

    def fail(self, engine_id: str, error: TandemError) -> None:
        if target := self.frame_of(engine_id):
            frame, request_id = target
            frame.ended.append(error_frame(request_id, error))
        if isinstance(error, HandoffFault) and engine_id in self._clients:
            self.handoff_failures[error.cause] += 1
        cancelled = isinstance(error, RequestCancelled)
        if not cancelled and (client := self._clients.get(engine_id)) is not None:
            level = logging.DEBUG if error.code in _REFUSALS else logging.WARNING
            log.log(level, "request failed", extra=self._names(engine_id, client) | {"code": error.code.value})
        self.close(engine_id, RequestState.CANCELLED if cancelled else RequestState.FAILED)

    def _names(self, engine_id: str, client: Client) -> dict[str, str]:
        """What the router's logs call it; its own id has the number of the attempt behind it."""
        names = {"request": client.request_id.rpartition(".")[0] or client.request_id, "attempt": client.request_id}
        trace_id = self._trace_ids.get(engine_id)
        return names if trace_id is None else names | {"trace_id": trace_id}

    def refuse(self, session: int, request_id: str, error: TandemError) -> None:
        """A frame that never became a request."""
        if session in self.sessions:
            self.outbox.frame(session).ended.append(error_frame(request_id, error))
        self.ends[RequestState.REJECTED] += 1

    def close(self, engine_id: str, state: RequestState) -> None:
        client = self._clients.pop(engine_id, None)
        if client is not None:
            del self._engine_ids[client]
            self._trace_ids.pop(engine_id, None)
            self._computing.pop(engine_id, None)
            self.ends[state] += 1
