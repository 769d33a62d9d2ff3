"""Images of requests on their way to the engine: a thread reads them, and the step loop goes on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from tandem.engine.api import Engine
from tandem.errors import RequestFailed, TandemError
from tandem.images import ExpandedPrompt, PromptImage
from tandem.v1 import worker_pb2
from worker.inbox import ImagesRead
from worker.requests import BUGS, RequestKey
from worker.wire import parse_images

log = logging.getLogger(__name__)


class ImageReading:
    """The frames of a request whose images are being read wait here, in order.

    Args:
        tell: takes what came of it, from the thread; `read` gets it then in the leader's.
    """

    def __init__(self, engine: Engine, reading: Executor, tell: Callable[[ImagesRead], None]) -> None:
        self._engine = engine
        self._reading = reading
        self._tell = tell
        self._waiting: dict[RequestKey, list[worker_pb2.RouterFrame]] = {}

    def sessions(self) -> set[int]:
        """Those whose routers wait for it."""
        return {key.session for key in self._waiting}

    def takes(self, session: int, request_id: str, frame: worker_pb2.RouterFrame) -> bool:
        """Whether the frame waits here. Raises InputError for a second request of the same id."""
        key = RequestKey(session, request_id)
        if (waiting := self._waiting.get(key)) is not None:
            waiting.append(frame)
            return True
        match frame.WhichOneof("frame"):
            case "expand_images":
                asked = frame.expand_images
                self._start(key, [], partial(self._engine.expand, tuple(asked.prompt), tuple(asked.images)))
                return True
            case "generate" | "reserve" | "prefill" as kind if getattr(frame, kind).work.images:
                images = parse_images(getattr(frame, kind).work)
                self._start(key, [frame], partial(self._read, images))
                return True
            case _:
                return False

    def read(self, result: ImagesRead) -> Sequence[worker_pb2.RouterFrame]:
        """The frames that waited for it, which go on now."""
        return self._waiting.pop(RequestKey(result.session, result.request_id), ())

    def drop(self, session: int) -> None:
        """The session ended."""
        self._waiting = {key: frames for key, frames in self._waiting.items() if key.session != session}

    def _start(
        self, key: RequestKey, frames: list[worker_pb2.RouterFrame], read: Callable[[], ExpandedPrompt | None]
    ) -> None:
        self._waiting[key] = frames
        self._reading.submit(lambda: self._tell(ImagesRead(key.session, key.request_id, _result(read))))

    def _read(self, images: Sequence[PromptImage]) -> None:
        self._engine.read_images(images)


def _result(read: Callable[[], ExpandedPrompt | None]) -> ExpandedPrompt | TandemError | None:
    try:
        return read()
    except TandemError as error:
        return error
    except BUGS as error:
        log.exception("images could not be read")
        return RequestFailed.by(error)
