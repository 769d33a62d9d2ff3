"""Operations of one link on its device, of which several are under way: the device goes on while the host waits."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeAlias

from kvtransfer.causes import DeviceLost
from kvtransfer.transports.threads import LinkThread

AT_ONCE = 16  # more than a link announces ahead


class Pending(Protocol):
    def wait(self) -> int: ...


Start: TypeAlias = "Callable[[], Pending]"
Done: TypeAlias = "asyncio.Future[int]"


class PendingQueue:
    """Used on the loop.

    One operation of the link's thread starts what was asked for and waits for the oldest, and ends when nothing is
    under way. So an operation that was started is waited for even if the link closes, and one that hangs is seen as
    such; those that were not started are cancelled then.
    """

    def __init__(self, thread: LinkThread) -> None:
        self._thread = thread
        self._asked: deque[tuple[Start, Done]] = deque()
        self._lock = threading.Lock()
        self._works = False
        self._task: asyncio.Task[None] | None = None

    async def run(self, start: Start) -> int:
        """Starts an operation in the link's thread and waits for its end. Raises like `LinkThread.run`."""
        loop = asyncio.get_running_loop()
        done: Done = loop.create_future()
        with self._lock:
            self._asked.append((start, done))
            begins, self._works = not self._works, True
        if begins:
            self._task = asyncio.create_task(self._thread.run(self._work, loop))
            self._task.add_done_callback(self._worked)
        return await done

    def _worked(self, task: asyncio.Task[None]) -> None:
        """The thread took no operation, or failed in one: what was asked for will not start."""
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        with self._lock:
            dropped, self._asked = self._asked, deque()
            self._works = False
        for _, done in dropped:
            _end(done, error)

    # --- in the link's thread ------------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        under_way: deque[tuple[Pending, Done]] = deque()
        try:
            while True:
                while len(under_way) < AT_ONCE and (asked := self._next(is_idle=not under_way)) is not None:
                    self._start(loop, *asked, under_way)
                if not under_way:
                    return
                pending, done = under_way[0]
                digest = pending.wait()
                under_way.popleft()
                _tell(loop, partial(_finish, done, digest))
        except BaseException as error:
            for _, done in under_way:
                _tell(loop, partial(_end, done, error))
            raise

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
                raise


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
