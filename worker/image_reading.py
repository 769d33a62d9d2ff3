"""Images of requests on their way to the engine: a thread reads them, and the step loop goes on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from tandem.engine.api import Engine
from tandem.errors import RequestCancelled, RequestFailed, TandemError
from tandem.v1 import worker_pb2
from worker.inbox import ImagesRead
from worker.requests import RequestKey
from worker.wire import parse_images

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """`frames`: in their order; none of a prompt to expand. `is_left`: nobody waits for it any more."""

    frames: list[worker_pb2.RouterFrame]
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
        """Whether the frame waits here."""
        key, kind = RequestKey(session, request_id), frame.WhichOneof("frame")
        if (waiting := self._waiting.get(key)) is not None:
            if kind == "cancel":
                waiting.is_left = True  # what has not begun is never read
                self._tell(ImagesRead(session, request_id, RequestCancelled("the router cancelled the request")))
            else:
                waiting.frames.append(frame)
            return True
        if kind == "expand_images":
            asked = frame.expand_images
            self._start(key, [], partial(self._engine.expand, tuple(asked.prompt), tuple(asked.images)))
            return True
        if kind in ("generate", "reserve", "prefill") and (work := getattr(frame, kind).work).images:
            self._start(key, [frame], partial(self._read, work))
            return True
        return False

    def read(self, result: ImagesRead) -> Sequence[worker_pb2.RouterFrame] | None:
        """The frames that waited for it. None: nobody waits for it any more."""
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
        works = [getattr(frame, kind).work for frame, kind in self._first_frames() if kind != "reserve"]
        reserves = sum(kind == "reserve" for _, kind in self._first_frames())
        return len(works), sum(len(each.prompt) for each in works), reserves

    def close(self) -> None:
        """The last call. What has not begun is never read."""
        self._reading.shutdown(wait=False, cancel_futures=True)

    def _first_frames(self) -> Iterator[tuple[worker_pb2.RouterFrame, str]]:
        for waiting in self._waiting.values():
            if waiting.frames and (kind := waiting.frames[0].WhichOneof("frame")) is not None:
                yield waiting.frames[0], kind

    def _start(self, key: RequestKey, frames: list[worker_pb2.RouterFrame], read: Callable[[], object]) -> None:
        waiting = self._waiting[key] = _Waiting(frames)

        def work() -> None:
            if not waiting.is_left:
                self._tell(ImagesRead(key.session, key.request_id, _result(read)))

        self._reading.submit(work)

    def _read(self, work: worker_pb2.Work) -> object:
        return self._engine.read_images(parse_images(work))


def _result(read: Callable[[], object]) -> object:
    try:
        return read()
    except TandemError as error:
        return error
    except Exception as error:  # also torch's, of memory: it ends the request
        log.exception("images could not be read")
        return RequestFailed.by(error)
