"""Images of requests on their way to the engine: a thread reads them, and the step loop goes on meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from tandem.engine.api import Engine
from tandem.errors import InputError, RequestCancelled, RequestFailed, TandemError, UnavailableError, WorkerLost
from tandem.v1 import worker_pb2
from worker.inbox import ImagesRead
from worker.requests import RequestKey
from worker.wire import parse_images

log = logging.getLogger(__name__)

WAIT_LIMIT_S = 20.0  # for the reads of others; leases of KV blocks last 30 s by default
READ_LIMIT_S = 40.0  # of one read; a router waits 60 s for both


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request, or a prompt to expand, which has no `work`. The first of `frames` brought the work; they are taken up
    in this order. `left`: why its images need not be read any more."""

    work: worker_pb2.Work | None = None
    frames: list[worker_pb2.RouterFrame] = field(default_factory=list)
    left: TandemError | None = None
    has_begun: bool = False
    waited_s: float = 0.0  # until then
    read_s: float = 0.0


class Reading(Protocol):
    """Does one piece of work after another."""

    def submit(self, work: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class ReadingThread:
    """A daemon: a read that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="images", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class ImageReading:
    """The frames of a request whose images are being read wait here.

    Args:
        tell: takes what came of it, from the thread; `read` gets it then in the leader's.
    """

    def __init__(self, engine: Engine, reading: Reading, tell: Callable[[ImagesRead], None]) -> None:
        self._engine = engine
        self._reading = reading
        self._tell = tell
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._current: _Waiting | None = None  # set by the thread

    def sessions(self) -> set[int]:
        """Those whose routers wait for it."""
        return {key.session for key in self._waiting}

    def takes(self, session: int, request_id: str, frame: worker_pb2.RouterFrame) -> bool:
        """Whether the frame waits here. Raises InputError for a prompt to expand under an id that is in use."""
        key, kind = RequestKey(session, request_id), frame.WhichOneof("frame")
        if (waiting := self._waiting.get(key)) is not None:
            if kind == "cancel":
                self._leave(key, waiting, RequestCancelled("the router cancelled the request"))
                return True
            if kind == "expand_images":
                raise InputError("request_id: expected a new id", field="request_id")
            if waiting.work is not None:
                waiting.frames.append(frame)
            return waiting.work is not None
        if kind == "expand_images":
            asked = frame.expand_images
            prompt, images = tuple(asked.prompt), tuple(asked.images)
            self._start(key, _Waiting(), partial(self._engine.expand, prompt, images, asked.cache_salt))
            return True
        if kind in ("generate", "reserve", "prefill") and (work := getattr(frame, kind).work).images:
            self._start(key, _Waiting(work, [frame]), partial(self._read, work))
            return True
        return False

    def read(self, result: ImagesRead) -> Sequence[worker_pb2.RouterFrame] | None:
        """Returns the frames that waited for this result; None: the router has another already, or is gone."""
        key = RequestKey(result.session, result.request_id)
        waiting = self._waiting.get(key)
        if waiting is None or (waiting.left is not None and waiting.left is not result.result):
            return None
        del self._waiting[key]
        return waiting.frames

    def drop(self, session: int) -> None:
        """The session ended."""
        for key in [each for each in self._waiting if each.session == session]:
            self._waiting.pop(key).left = RequestCancelled("the router is gone")

    def tick(self, passed_s: float) -> None:
        """Refuses what has waited for WAIT_LIMIT_S. Raises WorkerLost if a read takes longer than READ_LIMIT_S: it
        hangs, and all others wait for it. `passed_s`: since the last call."""
        passed_s = min(passed_s, WAIT_LIMIT_S / 2)  # a suspended host is no hang
        if (current := self._current) is not None:
            current.read_s += passed_s
            if current.read_s > READ_LIMIT_S:
                raise WorkerLost(f"images: a read took over {READ_LIMIT_S:g} s: this worker ends, and starts again")
        for key, waiting in self._waiting.items():
            if not waiting.has_begun and waiting.left is None:
                waiting.waited_s += passed_s
                if waiting.waited_s > WAIT_LIMIT_S:
                    late = f"images: those of others took over {WAIT_LIMIT_S:g} s to read: retry later"
                    self._leave(key, waiting, UnavailableError(late, field="images"))

    def load(self) -> tuple[int, int, int]:
        """Requests whose prompts are to be computed once their images are read, the tokens of these, and requests whose
        KV is to come then."""
        waiting = [each for each in self._waiting.values() if each.work is not None]
        computed = [each.work for each in waiting if not each.frames[0].HasField("reserve")]
        return len(computed), sum(len(each.prompt) for each in computed if each), len(waiting) - len(computed)

    def close(self) -> None:
        """The last call. What has not begun is never read."""
        for session in self.sessions():
            self.drop(session)
        self._reading.close()

    def _start(self, key: RequestKey, waiting: _Waiting, read: Callable[[], object]) -> None:
        self._waiting[key] = waiting

        def work() -> None:
            if waiting.left is not None:
                return
            waiting.has_begun, self._current = True, waiting
            result = _result(read)
            self._current = None
            self._tell(ImagesRead(key.session, key.request_id, result))

        self._reading.submit(work)

    def _leave(self, key: RequestKey, waiting: _Waiting, error: TandemError) -> None:
        """What has not begun is never read."""
        waiting.left = error
        self._tell(ImagesRead(key.session, key.request_id, error))

    def _read(self, work: worker_pb2.Work) -> object:
        return self._engine.read_images(parse_images(work), work.cache_salt)


def _result(read: Callable[[], object]) -> object:
    try:
        return read()
    except TandemError as error:
        return error
    except Exception as error:  # also torch's, of memory: it ends the request
        log.exception("images could not be read")
        return RequestFailed.by(error)
