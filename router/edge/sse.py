"""Server-sent events, written from answers straight to their connection.

A streamed answer is written once per token, so the cost of a write is most of the cost of a request. Events bypass the
layers of ASGI's `send`, and a callback pushes them: no task wakes up per token. All that arrives for a stream before
its next flush by the `WriteBatcher` is one write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from itertools import chain
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.edge.json_slices import Slices, next_slice
from router.edge.limits.http import SCOPE_KEY
from router.edge.openai.answer_format import AnswerFormat
from router.edge.write_pauses import WritePauses, for_each_in_turns, set_done
from router.requests.answers import Answers, Arrival
from tandem.errors import TandemError

TIMER_S = 0.001  # how exact the event loop's timers are


class Connection(Protocol):
    """The body of the answer in progress on a client's connection."""

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Calls `call` when the connection is lost, at once if it is lost already. None: no call any more."""
        ...

    @property
    def write_paused(self) -> bool:
        """The client reads too slowly: write nothing until `drained`."""
        ...

    async def drained(self) -> None:
        """Also returns when the connection is lost."""
        ...

    def write_chunk(self, data: bytes) -> None:
        """Never waits. Does nothing if the connection is lost. `data` is not empty."""
        ...


class WriteBatcher:
    """Flushes the streams that have something to write, one after the other. While the router is busy, one that wrote
    less than a pause ago waits for a pause of its own, so that no flush is of all streams at once: new requests would
    wait for it. `arrived`: how often something came for any stream, since the last flush."""

    def __init__(self, pauses: WritePauses | None = None) -> None:
        self.pauses = pauses or WritePauses()
        self.arrived = 0
        self._due: list[_StreamWriter] = []
        self._paused: deque[tuple[float, _StreamWriter]] = deque()  # with the ends of their pauses

    def add(self, writer: _StreamWriter) -> None:
        """`writer` has something to write."""
        if self.pauses.pause_s and self._pauses_before(writer):
            return
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(writer)

    def _pauses_before(self, writer: _StreamWriter) -> bool:
        """Whether it waits for a pause, which then adds it."""
        loop = asyncio.get_running_loop()
        if not self._paused:
            self._measure()  # perhaps all streams were idle since the last time
        pause_s, now_s = self.pauses.pause_s, loop.time()
        if now_s - writer.written_s >= pause_s or writer.is_ending:
            return False
        if not self._paused:
            loop.call_later(pause_s, self._end_pauses)
        self._paused.append((now_s + pause_s, writer))
        return True

    def _end_pauses(self) -> None:
        loop = asyncio.get_running_loop()
        now_s, due = loop.time() + TIMER_S, []
        while self._paused and self._paused[0][0] <= now_s:
            due.append(self._paused.popleft()[1])
        if self._paused:
            loop.call_later(self._paused[0][0] - now_s + TIMER_S, self._end_pauses)
        self._write(due)

    def _flush(self) -> None:
        due, self._due = self._due, []
        self._write(due)

    def _write(self, due: list[_StreamWriter]) -> None:
        for_each_in_turns(due, _StreamWriter.flush)
        self._measure()

    def _measure(self) -> None:
        arrived, self.arrived = self.arrived, 0
        self.pauses.measure(arrived)


class SseResponse(Response):
    """`first` has arrived already, so that a failure before the first token gets its own HTTP status."""

    def __init__(
        self, answers: Answers, form: AnswerFormat, first: list[Arrival], batcher: WriteBatcher, executor: Executor
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answers = answers
        self._form = form
        self._first = first
        self._batcher = batcher
        self._executor = executor
        self.failure: TandemError | None = None  # what the answer ended with, if it did not finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope[SCOPE_KEY]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            writer = _StreamWriter(self._answers, self._form, connection, self._batcher, self._executor)
            try:
                writer.start(self._first)
                connection.when_lost(writer.lost)
                await writer.ended
            finally:
                writer.stop()
            self.failure = writer.failure
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answers.cancel()
            connection.when_lost(None)  # a connection that stays open would keep the answers in memory


class _StreamWriter:
    """Writes one streamed answer. `ended` is set when nothing more will be written. While a thread makes slices of what
    has arrived, what arrives next waits in the answers, which are bounded."""

    def __init__(
        self,
        answers: Answers,
        form: AnswerFormat,
        connection: Connection,
        batcher: WriteBatcher,
        executor: Executor,
    ) -> None:
        self._answers = answers
        self._form = form
        self._connection = connection
        self._batcher = batcher
        self._executor = executor
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: TandemError | None = None
        # On the event loop's clock; 0.0: the router was not busy then, so the next write needs no pause.
        self.written_s = 0.0
        self._is_due = False
        self._draining: asyncio.Task[None] | None = None
        self._slicing: asyncio.Task[None] | None = None

    def start(self, first: list[Arrival]) -> None:
        is_last = self._answers.ended
        self._write(chain(self._form.begin(), self._form.events(first), self._form.end() if is_last else ()), is_last)
        self._answers.wake_with(self._wake)
        self._wake()

    def lost(self) -> None:
        """The connection is lost."""
        self._answers.cancel()
        if self._slicing is not None:
            self._slicing.cancel()
            set_done(self.ended)

    def stop(self) -> None:
        self._answers.wake_with(_ignore)
        self.ended.cancel()
        for task in (self._draining, self._slicing):
            if task is not None:
                task.cancel()

    @property
    def is_ending(self) -> bool:
        """What it writes next is its last."""
        return self._answers.is_ending

    def _wake(self) -> None:
        self._batcher.arrived += 1
        if not self._is_due or self.is_ending:  # which does not wait for the pause of the tokens before it
            self._is_due = True
            self._batcher.add(self)

    def flush(self) -> None:
        """Writes what has arrived. Never raises, as other streams are written in the same flush."""
        self._is_due = False
        if self.ended.done() or self._slicing is not None:
            return
        if self._connection.write_paused:
            self._wait_for_reader()
            return
        try:
            self._write_arrived()
        except Exception as error:  # the request's own task raises it
            self.ended.set_exception(error)

    def _write_arrived(self) -> None:
        """Writes all arrivals, then the end if it has arrived too. An error comes after everything before it."""
        pieces: Iterable[bytes] = ()
        is_last = False
        try:
            pieces = self._form.events(self._answers.take())
            if self._answers.has_failed:
                self._answers.take()
            if self._answers.ended:
                pieces = chain(pieces, self._form.end())
                is_last = True
        except TandemError as error:
            self.failure = error.with_traceback(None)
            pieces = chain(pieces, self._form.failed(error))  # also to a client that was cut as it read too slowly
            is_last = True
        self._write(pieces, is_last)

    def _write(self, pieces: Iterable[bytes], is_last: bool) -> None:
        if isinstance(pieces, list) and len(pieces) == 1:  # as nearly always
            self._write_chunk(pieces[0])
        else:
            rest = iter(pieces)
            first, is_done = next_slice(rest)
            if first:
                self._write_chunk(first)
            if not is_done:
                self._slicing = asyncio.create_task(self._write_rest(Slices(rest), is_last))
                return
        if is_last:
            self.ended.set_result(None)

    def _write_chunk(self, data: bytes) -> None:
        self._connection.write_chunk(data)
        if self._batcher.pauses.pause_s:
            self.written_s = self.ended.get_loop().time()

    async def _write_rest(self, slices: Slices, is_last: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not slices.is_done:
                if self._connection.write_paused:
                    await self._connection.drained()
                if part := await loop.run_in_executor(self._executor, slices.next):
                    self._connection.write_chunk(part)
        except Exception as error:  # the request's own task raises it
            self.ended.set_exception(error)
        self._slicing = None
        if is_last:
            set_done(self.ended)
        self._wake()

    def _wait_for_reader(self) -> None:
        """Further pieces stay in the answers, which are bounded."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._connection.drained())
            self._draining.add_done_callback(self._drained)

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._draining = None
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
            self._wake()


def _ignore() -> None:
    """Replaces the wake-up of a stopped writer."""
