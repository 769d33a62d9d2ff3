"""The staging of an agent: one bounded area of host or device memory, leased by the operations of all links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault

SLOT_BYTES = 1 << 20
STAGING_BYTES = 128 << 20
WAIT_S = 1.5  # less than a link may stall
LOOK_S = 0.05  # between two looks at whether a lease is still wanted
_operation = threading.local()


def set_unwanted(check: Callable[[], bool]) -> None:
    """Tells whether the operation that this thread runs is still wanted, which ends its wait for a lease."""
    _operation.is_unwanted = check


M = TypeVar("M")


class LeaseLost(HandoffFault):
    """A library may still write to a lease, which is never given to another."""

    def __init__(self, message: str) -> None:
        super().__init__(HandoffCause.TRANSPORT, message)


class Staging(Generic[M]):
    """
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
        self._changed = threading.Condition()

    @property
    def area(self) -> M:
        """All of it, to be registered with a library once."""
        with self._changed:
            if self._area is None:
                self._area = self._make(self._slots * SLOT_BYTES)
            return self._area

    @contextmanager
    def lease(self, size_bytes: int) -> Iterator[M]:
        """u8 [size_bytes]. Waits until others return theirs.

        An operation must not wait for a second lease while it holds one.

        Raises:
            HandoffFault: (transport) none became free in time, or the link was closed.
        """
        count = -(-size_bytes // SLOT_BYTES)
        area: Any = self.area  # numpy and torch have no protocol in common
        first = self._take(count)
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

    def _take(self, count: int) -> int:
        deadline_s = time.monotonic() + WAIT_S
        is_unwanted = getattr(_operation, "is_unwanted", None)
        with self._changed:
            while (first := self._find(count)) is None:
                if is_unwanted is not None and is_unwanted():
                    raise HandoffFault(HandoffCause.TRANSPORT, "staging: the link was closed")
                if time.monotonic() >= deadline_s:
                    raise HandoffFault(HandoffCause.TRANSPORT, "staging: too many handoffs at once in this agent")
                self._changed.wait(LOOK_S)
            self._used[first : first + count] = [True] * count
            return first

    def _give_back(self, first: int, count: int) -> None:
        with self._changed:
            self._used[first : first + count] = [False] * count
            self._changed.notify_all()

    def _find(self, count: int) -> int | None:
        """The first of `count` free neighbours: the lowest, so that little memory becomes resident."""
        free = 0
        for slot, is_used in enumerate(self._used):
            free = 0 if is_used else free + 1
            if free == count:
                return slot - count + 1
        return None
