"""The requests of one worker by router session, and the frames that go back to the routers.

Each request gets an engine id of its own here, so a second attempt under the same request id never collides with
remains of the first.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from kvtransfer.causes import HandoffCause, HandoffFault
from tandem.clock import Clock, SystemClock
from tandem.engine.api import EngineLoad, PromptScores, StepResult, TokenOut
from tandem.errors import ErrorCode, InputError, RequestCancelled, RequestFailed, TandemError
from tandem.request import FinishReason, RequestState
from tandem.rpc.identity import WorkerEpoch
from tandem.v1 import worker_pb2
from worker.wire import FINISH_REASONS, error_frame, load_frame, reach_frame, scores_frame, token_frame

SendFrame = Callable[[int, bytes], None]

log = logging.getLogger(__name__)

MAX_TRACE_ID_CHARS = 32
# Those of the host's code. A RuntimeError may be a GPU's, after which the process cannot go on.
BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_REFUSALS = frozenset({ErrorCode.KV_EXHAUSTED, ErrorCode.UNAVAILABLE})  # logged at DEBUG: overload makes many
PROGRESS_REPORT_S = 1.0  # an unchanged load is sent again this often to routers that have a request here


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names a request within one router session."""

    session: int
    request_id: str


class Outbox:
    """Gathers the results of one step into one frame per router session."""

    def __init__(self, send: SendFrame, clock: Clock | None = None) -> None:
        self._send = send
        self._clock = clock or SystemClock()
        self._frames: defaultdict[int, worker_pb2.WorkerFrame] = defaultdict(worker_pb2.WorkerFrame)
        self._sent_load: EngineLoad | None = None
        self._load_sent_at_s = 0.0
        self._flushed_at_s = 0.0
        self._sent_reach: frozenset[WorkerEpoch] = frozenset()
        self._frames_seen: Counter[int] = Counter()  # by session

    def frame(self, session: int) -> worker_pb2.WorkerFrame:
        return self._frames[session]

    def drop(self, session: int) -> None:
        self._frames.pop(session, None)
        del self._frames_seen[session]

    def count_frame(self, session: int) -> None:
        """Counts a frame that the leader took up; the next flush reports the count to the router, even alone."""
        self._frames_seen[session] += 1
        self.frame(session)

    def report_computing(self, busy_sessions: Callable[[], Iterable[int]]) -> bool:
        """Tells routers whose requests are here that a step is under way, if it has taken PROGRESS_REPORT_S since
        they heard of this worker. Returns whether it did."""
        now_s = self._clock.now_s()
        if now_s - self._flushed_at_s < PROGRESS_REPORT_S:
            return False
        self._flushed_at_s = now_s
        for session in busy_sessions():
            self._send(session, worker_pb2.WorkerFrame(computing=True, sent_at_s=now_s).SerializeToString())
        return True

    def flush(
        self,
        load: EngineLoad,
        steps: int,
        reach: frozenset[WorkerEpoch],
        sessions: Iterable[int],
        busy_sessions: Callable[[], Iterable[int]],
    ) -> None:
        """Sends every pending frame, and load and reach to all sessions when they changed.

        Sessions with requests here get the load every PROGRESS_REPORT_S even if unchanged: it shows that the step loop
        runs.
        """
        now_s = self._flushed_at_s = self._clock.now_s()
        receivers: Iterable[int] = ()
        if load != self._sent_load:
            receivers = sessions
        elif now_s - self._load_sent_at_s >= PROGRESS_REPORT_S:
            receivers = busy_sessions()
        if receivers:
            self._sent_load, self._load_sent_at_s = load, now_s
            wire = load_frame(load, steps)
            for session in receivers:
                self._frames[session].load.CopyFrom(wire)
        if reach != self._sent_reach:
            self._sent_reach = reach
            for session in sessions:
                self._frames[session].reach.CopyFrom(reach_frame(reach))
        for session, frame in self._frames.items():
            frame.sent_at_s = now_s
            frame.frames_seen = self._frames_seen[session]
            self._send(session, frame.SerializeToString())
        self._frames.clear()


class RequestBook:
    """The live requests of this worker. Each one leaves through `finish`, `part_done`, `fail` or `close`, exactly
    once."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.ends: Counter[RequestState] = Counter()
        self.handoff_failures: Counter[HandoffCause] = Counter()
        self.sessions: dict[int, str] = {}
        self._ids = count(1)
        self._keys: dict[str, RequestKey] = {}  # by engine id
        self._engine_ids: dict[RequestKey, str] = {}
        self._trace_ids: dict[str, str] = {}  # by engine id, where the router sent one
        self._computing: dict[str, float] = {}  # by engine id: when the first step with its prompt began

    def open(self, session: int, request_id: str, trace_id: str = "") -> str:
        """Returns the engine id of a new request; `trace_id` is for the logs. Raises InputError when the session
        already has a live request of that id."""
        key = RequestKey(session, request_id)
        if not request_id or key in self._engine_ids:
            raise InputError(f"request_id: expected a new, non-empty id, got {request_id!r}", field="request_id")
        engine_id = f"{next(self._ids)}:{request_id}"
        self._keys[engine_id] = key
        self._engine_ids[key] = engine_id
        if trace_id:
            self._trace_ids[engine_id] = trace_id[:MAX_TRACE_ID_CHARS]
        return engine_id

    def find(self, session: int, request_id: str) -> str | None:
        return self._engine_ids.get(RequestKey(session, request_id))

    def is_open(self, engine_id: str) -> bool:
        return engine_id in self._keys

    def of_session(self, session: int) -> list[str]:
        return [engine_id for engine_id, key in self._keys.items() if key.session == session]

    def busy_sessions(self) -> set[int]:
        """Sessions with a live request."""
        return {key.session for key in self._keys.values()} & self.sessions.keys()

    def frame_of(self, engine_id: str) -> tuple[worker_pb2.WorkerFrame, str] | None:
        """The frame to add to and the router's request id; None when the request or its session is gone."""
        key = self._keys.get(engine_id)
        if key is None or key.session not in self.sessions:
            return None
        return self.outbox.frame(key.session), key.request_id

    def computing(self, engine_id: str, since_s: float) -> None:
        """Notes when the first step with the request's prompt began."""
        if engine_id in self._keys:
            self._computing[engine_id] = since_s

    def computing_since_s(self, engine_id: str) -> float | None:
        return self._computing.get(engine_id)

    def finish(self, engine_id: str, reason: FinishReason) -> None:
        if target := self.frame_of(engine_id):
            frame, request_id = target
            frame.ended.add(request_id=request_id, finish_reason=FINISH_REASONS[reason])
        self.close(engine_id, RequestState.FINISHED)

    def part_done(self, engine_id: str) -> None:
        """This worker's part is over, and nothing else tells the router: the request goes on elsewhere."""
        if target := self.frame_of(engine_id):
            frame, request_id = target
            frame.ended.add(request_id=request_id)
        self.close(engine_id, RequestState.FINISHED)

    def fail(self, engine_id: str, error: TandemError) -> None:
        if target := self.frame_of(engine_id):
            frame, request_id = target
            frame.ended.append(error_frame(request_id, error))
        if isinstance(error, HandoffFault) and engine_id in self._keys:
            self.handoff_failures[error.cause] += 1
        cancelled = isinstance(error, RequestCancelled)
        if not cancelled and (key := self._keys.get(engine_id)) is not None:
            level = logging.DEBUG if error.code in _REFUSALS else logging.WARNING
            log.log(level, "request failed", extra=self._log_fields(engine_id, key) | {"code": error.code.value})
        self.close(engine_id, RequestState.CANCELLED if cancelled else RequestState.FAILED)

    def _log_fields(self, engine_id: str, key: RequestKey) -> dict[str, str]:
        """The ids that the router's logs use. Routers send `REQUEST.ATTEMPT` as the request id."""
        names = {"request": key.request_id.rpartition(".")[0] or key.request_id, "attempt": key.request_id}
        trace_id = self._trace_ids.get(engine_id)
        return names if trace_id is None else names | {"trace_id": trace_id}

    def refuse(self, session: int, request_id: str, error: TandemError) -> None:
        """Reports a frame that never became a request, or one that was cancelled before it did."""
        if session in self.sessions:
            self.outbox.frame(session).ended.append(error_frame(request_id, error))
        self.ends[RequestState.CANCELLED if isinstance(error, RequestCancelled) else RequestState.REJECTED] += 1

    def close(self, engine_id: str, state: RequestState) -> None:
        key = self._keys.pop(engine_id, None)
        if key is not None:
            del self._engine_ids[key]
            self._trace_ids.pop(engine_id, None)
            self._computing.pop(engine_id, None)
            self.ends[state] += 1


def report_step(result: StepResult, requests: RequestBook, began_s: float, ended_s: float) -> dict[str, TandemError]:
    """Adds a step's tokens and prompt scores to the routers' frames; to a first token, when its prompt was computed.
    Returns the errors of requests whose output could not be added.

    `began_s`, `ended_s`: of the step, on the clock of the frames.
    """
    for engine_id in result.began:
        requests.computing(engine_id, began_s)
    failed: dict[str, TandemError] = {}
    outputs: list[PromptScores | TokenOut] = [*result.prompt_scores, *result.tokens]
    for output in outputs:
        if output.request_id not in failed and (target := requests.frame_of(output.request_id)):
            try:
                _report(output, *target, requests.computing_since_s(output.request_id), ended_s)
            except BUGS as error:
                log.exception("a request's output could not be reported")
                failed[output.request_id] = RequestFailed.by(error)
    return failed


def _report(
    output: PromptScores | TokenOut,
    frame: worker_pb2.WorkerFrame,
    request_id: str,
    computing_at_s: float | None,
    ended_s: float,
) -> None:
    if isinstance(output, PromptScores):
        frame.prompt_scores.append(scores_frame(request_id, output))
        return
    wire = token_frame(request_id, output)
    if output.cached_tokens is not None and computing_at_s:
        wire.computing_at_s, wire.sampled_at_s = computing_at_s, ended_s
    frame.tokens.append(wire)
