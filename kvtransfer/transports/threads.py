"""The threads of an agent, which its links share. Blocking work never runs on the agent's loop.

A link's operations run in order, each in any thread. An operation that waits for a library or a peer says so
(`LinkThread.waiting`): meanwhile it touches no pool, so if its link closes, it is abandoned and its thread replaced. An
operation that hangs anywhere else may still read or write blocks, which only the end of the process stops.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault
from kvtransfer.pool.staging import set_waiter

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], None]
MAX_THREADS = 12  # more links than this at work at once take turns
MAX_WAITING = 36  # threads that only wait for others, beyond these
MAX_ABANDONED = 4  # threads in hung operations, beyond which the process must end
IDLE_S = 10.0  # a thread without work ends after this time
INLINE_BYTES = 256 << 10  # about 50 µs of copying and hashing
HANG_GRACE_S = 1.0  # time for an operation to end a copy, on a busy machine, after its link closed


class AgentThreads:
    """At most `MAX_THREADS` threads at work, started when needed. Those that wait for peers do not count, so that a few
    peers that are stuck do not hold up the others.

    `on_hung` is called with a link's name if only the end of the process can stop its operation, or if the device is
    lost.
    """

    def __init__(self, on_hung: Callable[[str], None] | None = None) -> None:
        self.on_hung = on_hung or log.error
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._working = 0
        self._idle = 0
        self._alive = 0
        self._abandoned = 0

    def start(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
            else:
                self._add_thread()

    def _add_thread(self) -> None:
        if self._working < MAX_THREADS and self._alive < MAX_THREADS + MAX_WAITING:
            self._working += 1
            self._alive += 1
            threading.Thread(target=self._work, name="links", daemon=True).start()

    def begin_wait(self) -> None:
        """The calling thread will wait for others."""
        with self._changed:
            self._working -= 1
            if len(self._jobs) > self._idle:
                self._add_thread()

    def end_wait(self) -> None:
        with self._changed:
            self._working += 1

    def abandon(self, name: str) -> None:
        """The thread that runs this link's operation waits in it, perhaps for ever."""
        with self._changed:
            self._abandoned += 1
            is_last = self._abandoned > MAX_ABANDONED
        log.error("%s: an operation hangs; its thread is abandoned", name)
        if is_last:
            self.on_hung(name)

    def recovered(self) -> None:
        """An abandoned operation has returned, and its thread serves again."""
        with self._changed:
            self._abandoned -= 1

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Job | None:
        """The next job; None after a time without one."""
        with self._changed:
            while not self._jobs:
                self._idle += 1
                is_woken = self._changed.wait(IDLE_S)
                self._idle -= 1
                if not is_woken and not self._jobs:
                    self._working -= 1
                    self._alive -= 1
                    return None
            return self._jobs.popleft()


class LinkThread:
    """The operations of one link, which run in order."""

    def __init__(self, name: str, threads: AgentThreads) -> None:
        self.moves_pieces = False  # earlier operations have their own long timeouts and use no pool
        self._name = name
        self._threads = threads
        self._jobs: deque[tuple[Job, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()
        self._current: asyncio.Future[None] | None = None
        self._is_waiting = False
        self._is_staging = False
        self._is_abandoned = False
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_held_up(self) -> bool:
        """Whether its operation waits for this agent's threads or staging, so that its peer is not to blame."""
        return self._is_staging or (self._current is None and bool(self._jobs))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises what `function` raises; CancelledError if the link was closed before; HandoffFault (transport) if the
        operation hung."""
        found: list[T] = []
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def job() -> None:
            try:
                found.append(function(*args, **kwargs))
            except BaseException as error:  # passed on to the caller
                tell = partial(_fail, done, error)
            else:
                tell = partial(_finish, done)
            with suppress(RuntimeError):  # the loop is closed, and the agent ends: an abandoned operation came back
                loop.call_soon_threadsafe(tell)

        self._submit(job, done)
        try:
            await done
        except DeviceLost as error:
            log.error("%s: the device is lost: %s", self._name, error)
            self._threads.on_hung(self._name)  # the next agent can use the device again
            raise
        return found[0]

    async def run_on(self, size_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run` for work in memory only. Small work runs at once, because a thread switch would cost more."""
        if size_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        return await self.run(function, *args, **kwargs)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within an operation: waits for others, and touches neither a pool nor staging that another may lease.

        Raises HandoffFault (transport) at its end if the operation was abandoned meanwhile."""
        with self._lock:
            self._is_waiting = True
        self._threads.begin_wait()
        try:
            yield
        finally:
            self._threads.end_wait()
            with self._lock:
                self._is_waiting = False
                is_abandoned = self._is_abandoned
        if is_abandoned:
            raise HandoffFault(HandoffCause.TRANSPORT, f"{self._name}: the link was closed meanwhile")

    @contextmanager
    def held_up(self) -> Iterator[None]:
        self._is_staging = True
        try:
            with self.waiting():
                yield
        finally:
            self._is_staging = False

    def hung(self) -> None:
        """Only the end of the process can stop something of this link."""
        self._threads.on_hung(self._name)

    def close(self) -> None:
        """Never waits. A running operation ends because its link is closed too, or is abandoned soon after."""
        with self._lock:
            dropped, self._jobs = self._jobs, deque()
        for _, done in dropped:
            done.cancel()
        if self.moves_pieces and not self._is_closed:
            asyncio.get_running_loop().call_later(HANG_GRACE_S, self._check)
        self._is_closed = True

    def _submit(self, job: Job, done: asyncio.Future[None]) -> None:
        if self._is_closed:
            done.cancel()
            return
        with self._lock:
            self._jobs.append((job, done))
            starts = self._current is None and len(self._jobs) == 1
        if starts:
            self._threads.start(self._turn)

    def _turn(self) -> None:
        """Runs one operation, in a thread of the agent."""
        with self._lock:
            if not self._jobs:
                return
            job, self._current = self._jobs.popleft()
        set_waiter(self)
        job()
        with self._lock:
            self._current = None
            is_abandoned, more = self._is_abandoned, bool(self._jobs)
        if is_abandoned:
            self._threads.recovered()
        elif more:
            self._threads.start(self._turn)

    def _check(self) -> None:
        with self._lock:
            hung = self._current
            if hung is None or self._is_abandoned:
                return
            if self._is_waiting:
                self._is_abandoned = True
        if not self._is_abandoned:
            self._threads.on_hung(self._name)
            return
        self._threads.abandon(self._name)
        _fail(hung, HandoffFault(HandoffCause.TRANSPORT, f"{self._name}: an operation hangs after the link was closed"))


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
