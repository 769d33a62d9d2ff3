"""Images of requests on their way to the engine: a thread reads them, and the step loop goes on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from tandem.engine.api import Engine
from tandem.errors import InputError, RequestCancelled, RequestFailed, TandemError
from tandem.v1 import worker_pb2
from worker.inbox import ImagesRead
from worker.requests import RequestKey
from worker.wire import parse_images

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request, or a prompt to expand, which has no `work`. The first of `frames` brought the work; they are taken up
    in this order. `is_left`: its router has cancelled it or is gone."""

    work: worker_pb2.Work | None = None
    frames: list[worker_pb2.RouterFrame] = field(default_factory=list)
    is_left: bool = False


class ImageReading:
    """The frames of a request whose images are being read wait here.

    Args:
        tell: takes what came of it, from the thread; `read` gets it then in the leader's.
    """

    def __init__(self, engine: Engine, reading: Executor, tell: Callable[[ImagesRead], None]) -> None:
        self._engine = engine
        self._reading = reading
        self._tell = tell
        self._waiting: dict[RequestKey, _Waiting] = {}

    def sessions(self) -> set[int]:
        """Those whose routers wait for it."""
        return {key.session for key in self._waiting}

    def takes(self, session: int, request_id: str, frame: worker_pb2.RouterFrame) -> bool:
        """Whether the frame waits here. Raises InputError for a prompt to expand under an id that is in use."""
        key, kind = RequestKey(session, request_id), frame.WhichOneof("frame")
        if (waiting := self._waiting.get(key)) is not None:
            if kind == "cancel":
                waiting.is_left = True  # what has not begun is never read
                self._tell(ImagesRead(session, request_id, RequestCancelled("the router cancelled the request")))
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
        """Returns the frames that waited for this result; None: the router has cancelled the request or is gone."""
        key = RequestKey(result.session, result.request_id)
        waiting = self._waiting.get(key)
        if waiting is None or (waiting.is_left and not isinstance(result.result, RequestCancelled)):
            return None
        del self._waiting[key]
        return waiting.frames

    def drop(self, session: int) -> None:
        """The session ended."""
        for key in [each for each in self._waiting if each.session == session]:
            self._waiting.pop(key).is_left = True

    def load(self) -> tuple[int, int, int]:
        """Requests whose prompts are to be computed once their images are read, the tokens of these, and requests whose
        KV is to come then."""
        waiting = [each for each in self._waiting.values() if each.work is not None]
        computed = [each.work for each in waiting if not each.frames[0].HasField("reserve")]
        return len(computed), sum(len(each.prompt) for each in computed if each), len(waiting) - len(computed)

    def close(self) -> None:
        """The last call. What has not begun is never read."""
        self._reading.shutdown(wait=False, cancel_futures=True)

    def _start(self, key: RequestKey, waiting: _Waiting, read: Callable[[], object]) -> None:
        self._waiting[key] = waiting

        def work() -> None:
            if not waiting.is_left:
                self._tell(ImagesRead(key.session, key.request_id, _result(read)))

        self._reading.submit(work)

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
