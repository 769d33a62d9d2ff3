"""What waits to go over a link: first in, first out for each ticket, and the tickets take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TicketQueue(Generic[T]):
    """A long prompt's pieces do not hold up a short one's. For one event loop.

    Args:
        may_go: whether an item may leave now; one that may not holds back only what is behind it in its own line.
    """

    def __init__(self, may_go: Callable[[T], bool]) -> None:
        self._may_go = may_go
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()
        self._news = asyncio.Event()

    def put(self, ticket_id: str, item: T) -> None:
        self._lines.setdefault(ticket_id, deque()).append(item)
        self._news.set()

    def wake(self) -> None:
        """Something changed that `may_go` looks at."""
        self._news.set()

    async def get(self) -> T:
        """The next item that may go; waits for one."""
        while True:
            self._news.clear()
            for ticket_id, line in self._lines.items():
                if self._may_go(line[0]):
                    return self._take(ticket_id, line)
            await self._news.wait()

    def _take(self, ticket_id: str, line: deque[T]) -> T:
        item = line.popleft()
        if line:
            self._lines.move_to_end(ticket_id)
        else:
            del self._lines[ticket_id]
        return item

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())
