"""The staging of an agent: one bounded area of host or device memory, leased by the operations of all links."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault

SLOT_BYTES = 1 << 20
STAGING_BYTES = 128 << 20
WAIT_S = 10.0  # longer than a silent peer's link holds its lease
LOOK_S = 0.05  # between two looks at whether a lease is still wanted


class Waiter(Protocol):
    """The link whose operation a thread runs."""

    @property
    def is_closed(self) -> bool:
        """No longer wants a lease."""
        ...

    def held_up(self) -> AbstractContextManager[None]:
        """Entered while the operation waits for a lease, for which its peer is not to blame."""
        ...


class _Running(threading.local):
    waiter: Waiter | None = None


_running = _Running()


def set_waiter(waiter: Waiter) -> None:
    """Names the link whose operation this thread runs from now on."""
    _running.waiter = waiter


M = TypeVar("M")


class LeaseLost(HandoffFault):
    """A library may still write to a lease, which is never given to another."""

    def __init__(self, message: str) -> None:
        super().__init__(HandoffCause.TRANSPORT, message)


class Staging(Generic[M]):
    """Leases are given in the order in which they were asked for, so that a large one is not passed over for ever.

    Sending and receiving each have a quarter of their own and share the rest. So two agents that send to each other
    never both wait for what the other holds: a lease to receive needs no other lease to be returned.

    Args:
        make: allocates the area, at the first lease: u8 [bytes], page-aligned.
        largest_bytes: the largest lease.
    """

    def __init__(self, make: Callable[[int], M], largest_bytes: int) -> None:
        self._make = make
        self._slots = max(STAGING_BYTES, 4 * largest_bytes) // SLOT_BYTES
        self._area: M | None = None
        self._used = [False] * self._slots
        self._lost = 0
        self._queues: dict[bool, deque[object]] = {False: deque(), True: deque()}  # by `receives`
        self._changed = threading.Condition()

    @property
    def area(self) -> M:
        """All of it, to be registered with a library once."""
        with self._changed:
            if self._area is None:
                self._area = self._make(self._slots * SLOT_BYTES)
            return self._area

    @contextmanager
    def lease(self, size_bytes: int, *, receives: bool) -> Iterator[M]:
        """u8 [size_bytes]. Waits for its turn, until others return theirs.

        An operation must not wait for a second lease while it holds one.

        Raises:
            HandoffFault: (transport) none became free in time, or the link was closed.
        """
        count = -(-size_bytes // SLOT_BYTES)
        area: Any = self.area  # numpy and torch have no protocol in common
        first = self._take(count, receives=receives)
        try:
            yield area[first * SLOT_BYTES :][:size_bytes]
        except LeaseLost as lost:
            self._lost += count
            if self._lost > self._slots // 2:
                raise DeviceLost(f"staging: {lost.message}") from lost
            raise
        except BaseException:
            self._give_back(first, count)
            raise
        self._give_back(first, count)

    def _take(self, count: int, *, receives: bool) -> int:
        queue, turn = self._queues[receives], object()
        waiter = _running.waiter
        first: int | None = None
        with self._changed:
            queue.append(turn)
        try:
            if (first := self._try(count, turn, receives=receives)) is None:
                with waiter.held_up() if waiter is not None else nullcontext():
                    first = self._wait(count, turn, waiter, receives=receives)
            return first
        except BaseException:
            if first is not None:
                self._give_back(first, count)
            raise
        finally:
            with self._changed:
                queue.remove(turn)
                self._changed.notify_all()

    def _wait(self, count: int, turn: object, waiter: Waiter | None, *, receives: bool) -> int:
        deadline_s = time.monotonic() + WAIT_S
        with self._changed:
            while True:
                if waiter is not None and waiter.is_closed:
                    raise HandoffFault(HandoffCause.TRANSPORT, "staging: the link was closed")
                if (first := self._try(count, turn, receives=receives)) is not None:
                    return first
                if time.monotonic() >= deadline_s:
                    raise HandoffFault(HandoffCause.TRANSPORT, "staging: too many handoffs at once in this agent")
                self._changed.wait(LOOK_S)

    def _try(self, count: int, turn: object, *, receives: bool) -> int | None:
        """Takes `count` free neighbours if it is this turn: None if not, or if there are none."""
        with self._changed:
            if self._queues[receives][0] is not turn or (first := self._find(count, receives=receives)) is None:
                return None
            self._used[first : first + count] = [True] * count
            return first

    def _give_back(self, first: int, count: int) -> None:
        with self._changed:
            self._used[first : first + count] = [False] * count
            self._changed.notify_all()

    def _find(self, count: int, *, receives: bool) -> int | None:
        """The outermost `count` free neighbours, so that little memory becomes resident: the lowest to send, the
        highest to receive."""
        open_slots = self._slots - self._slots // 4
        free = 0
        for step in range(open_slots):
            slot = self._slots - 1 - step if receives else step
            free = 0 if self._used[slot] else free + 1
            if free == count:
                return slot if receives else slot - count + 1
        return None
