"""Server-sent events, from answers straight into their connection.

A streamed answer writes once for every token, so what a write costs is most of what a request costs. Events go past the
layers of ASGI's `send`, and are pushed by a callback: no task is woken for a token. What comes for a stream before the
next of its `Turns` is one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.edge.openai.format import AnswerFormat
from router.requests.answers import Answers, Arrival
from tandem.errors import ErrorCode, TandemError

SCOPE_KEY = "tandem.connection"
LOOK_S = 0.5  # so often it is seen whether the router is busy; shorter spells are no reason to keep tokens back
BUSY_SHARE = 0.75  # of the time: there is no core left to catch up with
REST_S = 0.025  # between two turns of a busy router


class Connection(Protocol):
    """The body of the answer that is under way on a client's connection."""

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Calls it when the client goes away, at once if it has. None: nobody is to be called any more."""
        ...

    @property
    def write_paused(self) -> bool:
        """The client reads too slowly: write nothing until `drained`."""
        ...

    async def drained(self) -> None:
        """Also returns when the client is gone."""
        ...

    def write_chunk(self, data: bytes) -> None:
        """Never waits; nothing happens when the client is gone. `data` is not empty."""
        ...


class Turns:
    """When streams write: all that have something, one after the other, at once. A busy router does so less often: what
    came for a stream meanwhile is one write, so that it falls behind less."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, busy_s: Callable[[], float] = time.thread_time):
        """`busy_s`: seconds for which the event loop's thread has worked."""
        self._now_s = now_s
        self._busy_s = busy_s
        self._due: list[_Pump] = []
        self._looked_s, self._had_worked_s = now_s(), busy_s()
        self._is_busy = False
        self._rests_until_s = 0.0

    def add(self, pump: _Pump) -> None:
        """It has something to write."""
        if not self._due:
            loop = asyncio.get_running_loop()
            if self._is_busy and (rest_s := self._rests_until_s - self._now_s()) > 0:
                loop.call_later(rest_s, self._turn)
            else:
                loop.call_soon(self._turn)
        self._due.append(pump)

    def _turn(self) -> None:
        due, self._due = self._due, []
        for pump in due:
            pump.turn()
        now_s = self._now_s()
        self._rests_until_s = now_s + REST_S
        if now_s - self._looked_s >= LOOK_S:
            worked_s = self._busy_s()
            self._is_busy = worked_s - self._had_worked_s >= BUSY_SHARE * (now_s - self._looked_s)
            self._looked_s, self._had_worked_s = now_s, worked_s


class SseResponse(Response):
    """Its first words are there already, so that what failed before them had its own HTTP status."""

    def __init__(self, answers: Answers, form: AnswerFormat, first: list[Arrival], turns: Turns) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answers = answers
        self._form = form
        self._first = first
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope[SCOPE_KEY]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pump = _Pump(self._answers, self._form, connection, self._turns)
            try:
                pump.start(self._first)
                await pump.ended
            finally:
                pump.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._answers.cancel()
            connection.when_lost(None)  # it may stay open for long, and would keep the answers in memory


class _Pump:
    """`ended` is set when nothing more will be written."""

    def __init__(self, answers: Answers, form: AnswerFormat, connection: Connection, turns: Turns) -> None:
        self._answers = answers
        self._form = form
        self._connection = connection
        self._turns = turns
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._due = False
        self._draining: asyncio.Task[None] | None = None

    def start(self, first: list[Arrival]) -> None:
        events = self._form.begin() + self._form.events(first)
        if self._answers.ended:
            events += self._form.end()
            self.ended.set_result(None)
        self._write(events)
        self._answers.wake_with(self._wake)
        self._wake()

    def stop(self) -> None:
        self._answers.wake_with(_nobody)
        self.ended.cancel()
        if self._draining is not None:
            self._draining.cancel()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._turns.add(self)

    def turn(self) -> None:
        """Writes what has come. Never raises: others write in the same turn."""
        self._due = False
        if self.ended.done():
            return
        if self._connection.write_paused:
            self._wait_for_reader()
            return
        try:
            self._move()
        except Exception as error:  # into the request's own task, as if it had been raised there
            self.ended.set_exception(error)

    def _move(self) -> None:
        """All that has come, and the end when that has come too: an error is told only after what came before it."""
        events: list[bytes] = []
        is_last = False
        try:
            events += self._form.events(self._answers.take())
            if self._answers.has_failed:
                self._answers.take()
            if self._answers.ended:
                events += self._form.end()
                is_last = True
        except TandemError as error:
            if error.code is not ErrorCode.CANCELLED:
                events += self._form.failed(error)
            is_last = True
        self._write(events)
        if is_last:
            self.ended.set_result(None)

    def _write(self, events: list[bytes]) -> None:
        if events:
            self._connection.write_chunk(events[0] if len(events) == 1 else b"".join(events))

    def _wait_for_reader(self) -> None:
        """What comes meanwhile stays with the answers, which are bounded."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._connection.drained())
            self._draining.add_done_callback(self._drained)

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._draining = None
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
            self._wake()


def _nobody() -> None:
    """Wakes nobody."""
