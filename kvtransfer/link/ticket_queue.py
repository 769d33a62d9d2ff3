"""The send queue of a link: first in, first out within a ticket, round-robin between tickets."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TicketQueue(Generic[T]):
    """A fair queue, so that a long prompt's pieces do not delay a short one's. For one event loop.

    Args:
        may_send: whether an item may be sent now. An item that may not blocks only its own ticket.
    """

    def __init__(self, may_send: Callable[[T], bool]) -> None:
        self._may_send = may_send
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()
        self._changed = asyncio.Event()

    def put(self, ticket_id: str, item: T) -> None:
        self._lines.setdefault(ticket_id, deque()).append(item)
        self._changed.set()

    def wake(self) -> None:
        """Call it when `may_send` may have changed."""
        self._changed.set()

    async def get(self) -> T:
        """Waits for the next item that may be sent."""
        while True:
            self._changed.clear()
            for ticket_id, line in self._lines.items():
                if self._may_send(line[0]):
                    return self._take(ticket_id, line)
            await self._changed.wait()

    def _take(self, ticket_id: str, line: deque[T]) -> T:
        item = line.popleft()
        if line:
            self._lines.move_to_end(ticket_id)
        else:
            del self._lines[ticket_id]
        return item

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())
