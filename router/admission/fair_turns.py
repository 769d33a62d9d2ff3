"""Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) of classes, and of the tenants in each class. Pure.

Work is counted in prompt tokens. While two keys both wait, their served tokens divided by their weights differ by at
most one request of each. A key that had no requests waiting saves up no turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

MAX_REMEMBERED = 1024  # keys without work that are ahead of the virtual clock


class QueueEntry(Protocol):
    @property
    def priority(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def tokens(self) -> int: ...


Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry", bound=QueueEntry)


class FairShares(Generic[Key]):
    """A virtual clock over keys. The key with the lowest tag is next; each turn advances its tag by cost / weight."""

    def __init__(self) -> None:
        self._now = 0.0
        self._waiting: dict[Key, float] = {}  # tags, in arrival order of the keys
        self._idle: dict[Key, float] = {}  # tags of keys without work that are ahead of the clock

    def tag(self, key: Key) -> float:
        """The tag of `key`, or the one it gets when its first request arrives."""
        waiting = self._waiting.get(key)
        return max(self._now, self._idle.get(key, 0.0)) if waiting is None else waiting

    def activate(self, key: Key) -> None:
        """`key` has work from now on."""
        if key not in self._waiting:
            self._waiting[key] = self.tag(key)
            self._idle.pop(key, None)

    def next(self) -> Key:
        """The key with the lowest tag; of equals, the first to arrive. At least one key must have work."""
        return min(self._waiting, key=self._waiting.__getitem__)

    def serve(self, key: Key, cost: float) -> None:
        """Counts a turn of `key`; `cost` is work / weight."""
        self._now = self._waiting[key]
        self._waiting[key] += cost

    def deactivate(self, key: Key) -> None:
        """`key` has no work left. When no key has any, the clock restarts at 0."""
        tag = self._waiting.pop(key)
        if not self._waiting:
            self._now = 0.0
            self._idle.clear()
            return
        self._idle[key] = tag
        if len(self._idle) > MAX_REMEMBERED:
            self._idle = {each: tag for each, tag in self._idle.items() if tag > self._now}
        if len(self._idle) > MAX_REMEMBERED:
            del self._idle[min(self._idle, key=self._idle.__getitem__)]


class _TenantQueue(Generic[Entry]):
    """The waiting requests of one tenant in one class, first in first out."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.tokens = 0


class _ClassQueue(Generic[Entry]):
    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.shares: FairShares[str] = FairShares()
        self.tenants: dict[str, _TenantQueue[Entry]] = {}
        self.tokens = 0


class FairTurns(Generic[Entry]):
    """Classes share by weight; tenants of one class share equally. Entries compare by identity.

    Args:
        weights: of every class an entry may have.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._classes: dict[str, _ClassQueue[Entry]] = {name: _ClassQueue(weight) for name, weight in weights.items()}
        self._shares: FairShares[str] = FairShares()
        self._returned: deque[Entry] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Entry) -> None:
        """Appends to the queue of its tenant."""
        each = self._classes[entry.priority]
        queue = each.tenants.setdefault(entry.tenant, _TenantQueue())
        queue.entries.append(entry)
        queue.tokens += entry.tokens
        each.tokens += entry.tokens
        each.shares.activate(entry.tenant)
        self._shares.activate(entry.priority)
        self._count += 1

    def put_first(self, entry: Entry) -> None:
        """Puts an entry at the very front. It has had its turn, so `take` counts no second one."""
        self._returned.appendleft(entry)
        self._count += 1

    def head(self) -> Entry | None:
        """The entry whose turn it is; changes nothing."""
        if self._returned:
            return self._returned[0]
        if not self._count:
            return None
        each = self._classes[self._shares.next()]
        return each.tenants[each.shares.next()].entries[0]

    def take(self, entry: Entry) -> None:
        """Removes the head and counts its turn."""
        if entry not in self._returned:
            each = self._classes[entry.priority]
            each.shares.serve(entry.tenant, entry.tokens)
            self._shares.serve(entry.priority, entry.tokens / each.weight)
        self.remove(entry)

    def remove(self, entry: Entry) -> None:
        """Removes an entry without counting a turn."""
        self._count -= 1
        if entry in self._returned:
            self._returned.remove(entry)
            return
        each = self._classes[entry.priority]
        queue = each.tenants[entry.tenant]
        queue.entries.remove(entry)
        queue.tokens -= entry.tokens
        each.tokens -= entry.tokens
        if not queue.entries:
            del each.tenants[entry.tenant]
            each.shares.deactivate(entry.tenant)
        if not each.tenants:
            self._shares.deactivate(entry.priority)

    def tokens_ahead(self, priority: str, tenant: str) -> float:
        """Prompt tokens of the waiting entries whose turn comes before that of a new entry."""
        if not self._count:
            return 0.0
        each = self._classes[priority]
        queued = {name: queue.tokens for name, queue in each.tenants.items()}
        weights = dict.fromkeys(queued, 1.0)
        inside = _ahead(each.shares, queued, weights, tenant, queued.get(tenant, 0), 1.0)
        others = {name: other.tokens for name, other in self._classes.items() if other.tenants}
        weights = {name: self._classes[name].weight for name in others}
        returned = sum(entry.tokens for entry in self._returned)
        return returned + _ahead(self._shares, others, weights, priority, inside, each.weight)

    def count(self, priority: str, tenant: str) -> int:
        """Waiting entries of one tenant in one class."""
        queue = self._classes[priority].tenants.get(tenant)
        return 0 if queue is None else len(queue.entries)

    def tenant_queues(self) -> Iterator[tuple[float, int, Entry]]:
        """Class weight, length and newest entry of each tenant's queue."""
        for each in self._classes.values():
            for queue in each.tenants.values():
                yield each.weight, len(queue.entries), queue.entries[-1]

    def __contains__(self, entry: Entry) -> bool:
        queue = self._classes[entry.priority].tenants.get(entry.tenant)
        return entry in self._returned or (queue is not None and entry in queue.entries)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._returned
        for each in self._classes.values():
            for queue in each.tenants.values():
                yield from queue.entries


def _ahead(
    shares: FairShares[str],
    queued: Mapping[str, float],
    weights: Mapping[str, float],
    key: str,
    own: float,
    weight: float,
) -> float:
    """Work ahead of a new entry of `key`: `own` of the same key, and the work of other keys with lower tags."""
    start = shares.tag(key) + own / weight
    return own + sum(
        min(work, max(0.0, (start - shares.tag(other)) * weights[other]))
        for other, work in queued.items()
        if other != key
    )
