"""Operations of one link on its device, of which several are under way: the device goes on while the host waits."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvtransfer.causes import DeviceLost
from kvtransfer.transports.threads import LinkThread

if TYPE_CHECKING:
    from kvtransfer.pool.device_pool import Pending

AT_ONCE = 16  # more than a link announces ahead
STARTS = 64  # in one operation of the link's thread, after which other links have their turn

Start: TypeAlias = "Callable[[], Pending]"
Done: TypeAlias = "asyncio.Future[int]"


class PendingQueue:
    """Used on the loop.

    One operation of the link's thread starts all that was asked for, up to `at_once`, then waits for the oldest, and so
    on; while it waits, nothing starts. It ends when nothing is under way, so an operation that was started is waited
    for even if the link closes, and one that hangs is seen as such; those that were not started are cancelled then.

    Args:
        at_once: 1 if an operation has ended when it was started, so that each is reported before the next starts.
    """

    def __init__(self, thread: LinkThread, at_once: int = AT_ONCE) -> None:
        self._thread = thread
        self._at_once = at_once
        self._asked: deque[tuple[Start, Done]] = deque()
        self._lock = threading.Lock()
        self._works = False
        self._task: asyncio.Task[bool] | None = None

    async def run(self, start: Start) -> int:
        """Starts an operation in the link's thread and waits for its end. Raises like `LinkThread.run`."""
        done: Done = asyncio.get_running_loop().create_future()
        with self._lock:
            self._asked.append((start, done))
            begins, self._works = not self._works, True
        if begins:
            self._begin()
        return await done

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._thread.run(self._work, asyncio.get_running_loop()))
        self._task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[bool]) -> None:
        """If the thread took no operation, or failed in one, what was asked for will not start."""
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            if task.result():
                self._begin()
            return
        with self._lock:
            dropped, self._asked = self._asked, deque()
            self._works = False
        for _, done in dropped:
            _end(done, error)

    # --- in the link's thread ------------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns whether its turn ended before it was idle."""
        under_way: deque[tuple[Pending, Done]] = deque()
        started = 0
        while True:
            while (
                started < STARTS
                and len(under_way) < self._at_once
                and (asked := self._next(is_idle=not under_way)) is not None
            ):
                started += 1
                self._start(loop, *asked, under_way)
            if not under_way:
                return started == STARTS
            self._wait(loop, under_way)

    def _next(self, *, is_idle: bool) -> tuple[Start, Done] | None:
        with self._lock:
            if self._asked:
                return self._asked.popleft()
            self._works = not is_idle
            return None

    def _start(
        self, loop: asyncio.AbstractEventLoop, start: Start, done: Done, under_way: deque[tuple[Pending, Done]]
    ) -> None:
        if self._thread.is_closed:
            _tell(loop, partial(_end, done, None))
            return
        try:
            under_way.append((start(), done))
        except BaseException as error:  # passed on; the others go on unless the device is lost
            _tell(loop, partial(_end, done, error))
            if isinstance(error, DeviceLost):
                _fail(loop, under_way, error)
                raise

    def _wait(self, loop: asyncio.AbstractEventLoop, under_way: deque[tuple[Pending, Done]]) -> None:
        pending, done = under_way[0]
        try:
            digest = pending.wait()
        except DeviceLost as error:
            _fail(loop, under_way, error)
            raise
        except BaseException as error:  # passed on; the others are still waited for
            _tell(loop, partial(_end, done, error))
        else:
            _tell(loop, partial(_finish, done, digest))
        under_way.popleft()


def _fail(loop: asyncio.AbstractEventLoop, under_way: deque[tuple[Pending, Done]], error: DeviceLost) -> None:
    """Nothing more is waited for: the process ends, because its device is lost."""
    for _, done in under_way:
        _tell(loop, partial(_end, done, error))


def _tell(loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and the agent ends
        loop.call_soon_threadsafe(tell)


def _finish(done: Done, digest: int) -> None:
    if not done.done():
        done.set_result(digest)


def _end(done: Done, error: BaseException | None) -> None:
    """None: cancelled."""
    if done.done():
        return
    if error is None:
        done.cancel()
    else:
        done.set_exception(error)
