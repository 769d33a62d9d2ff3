"""Whose turn it is: start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) of classes, and of tenants in each.

Work is counted in prompt tokens. While two keys both wait, the tokens they were served, divided by their weights,
differ by no more than one request of each. A key that had nothing waiting gains nothing by it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

MAX_REMEMBERED = 1024  # keys without work whose last turn still counts


class Queued(Protocol):
    @property
    def priority(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def tokens(self) -> int: ...


Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry", bound=Queued)


class FairShares(Generic[Key]):
    """A virtual clock over keys: the next is the one whose tag is least, and a turn moves its tag by cost / weight."""

    def __init__(self) -> None:
        self._now = 0.0
        self._waiting: dict[Key, float] = {}  # tags, in the order in which the keys came
        self._resting: dict[Key, float] = {}  # tags of keys without work that are ahead of the clock

    def tag(self, key: Key) -> float:
        """Where a newcomer of `key` would stand if nothing of it waited."""
        waiting = self._waiting.get(key)
        return max(self._now, self._resting.get(key, 0.0)) if waiting is None else waiting

    def wake(self, key: Key) -> None:
        """`key` has work."""
        if key not in self._waiting:
            self._waiting[key] = self.tag(key)
            self._resting.pop(key, None)

    def next(self) -> Key:
        """Whose turn it is; among equals who came first. Some key has work."""
        return min(self._waiting, key=self._waiting.__getitem__)

    def serve(self, key: Key, cost: float) -> None:
        """`key` has its turn; `cost` is work / weight."""
        self._now = self._waiting[key]
        self._waiting[key] += cost

    def rest(self, key: Key) -> None:
        """`key` has no work. When nobody has, all begin anew."""
        tag = self._waiting.pop(key)
        if not self._waiting:
            self._now = 0.0
            self._resting.clear()
            return
        self._resting[key] = tag
        if len(self._resting) > MAX_REMEMBERED:
            self._resting = {each: tag for each, tag in self._resting.items() if tag > self._now}
        if len(self._resting) > MAX_REMEMBERED:
            del self._resting[min(self._resting, key=self._resting.__getitem__)]


class _Flow(Generic[Entry]):
    """What one tenant has waiting in one class, first come first served."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.tokens = 0


class _Class(Generic[Entry]):
    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.shares: FairShares[str] = FairShares()
        self.flows: dict[str, _Flow[Entry]] = {}
        self.tokens = 0


class FairQueue(Generic[Entry]):
    """Classes share by weight; the tenants of a class share alike. Entries compare by identity.

    Args: `weights` of all classes that entries may have.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._classes: dict[str, _Class[Entry]] = {name: _Class(weight) for name, weight in weights.items()}
        self._shares: FairShares[str] = FairShares()
        self._returned: deque[Entry] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Entry) -> None:
        """At the end of its tenant's line."""
        each = self._classes[entry.priority]
        flow = each.flows.setdefault(entry.tenant, _Flow())
        flow.entries.append(entry)
        flow.tokens += entry.tokens
        each.tokens += entry.tokens
        each.shares.wake(entry.tenant)
        self._shares.wake(entry.priority)
        self._count += 1

    def put_first(self, entry: Entry) -> None:
        """Before everybody: it had its turn already, and the next one is not counted."""
        self._returned.appendleft(entry)
        self._count += 1

    def head(self) -> Entry | None:
        """Whose turn it is; nothing changes."""
        if self._returned:
            return self._returned[0]
        if not self._count:
            return None
        each = self._classes[self._shares.next()]
        return each.flows[each.shares.next()].entries[0]

    def take(self, entry: Entry) -> None:
        """The head has its turn."""
        if entry not in self._returned:
            each = self._classes[entry.priority]
            each.shares.serve(entry.tenant, entry.tokens)
            self._shares.serve(entry.priority, entry.tokens / each.weight)
        self.remove(entry)

    def remove(self, entry: Entry) -> None:
        """It no longer waits, and had no turn."""
        self._count -= 1
        if entry in self._returned:
            self._returned.remove(entry)
            return
        each = self._classes[entry.priority]
        flow = each.flows[entry.tenant]
        flow.entries.remove(entry)
        flow.tokens -= entry.tokens
        each.tokens -= entry.tokens
        if not flow.entries:
            del each.flows[entry.tenant]
            each.shares.rest(entry.tenant)
        if not each.flows:
            self._shares.rest(entry.priority)

    def tokens_ahead(self, priority: str, tenant: str) -> float:
        """Prompt tokens whose turn comes before that of a newcomer, as far as those who wait now decide it."""
        each = self._classes[priority]
        queued = {name: flow.tokens for name, flow in each.flows.items()}
        weights = dict.fromkeys(queued, 1.0)
        inside = _ahead(each.shares, queued, weights, tenant, queued.get(tenant, 0), 1.0)
        others = {name: other.tokens for name, other in self._classes.items() if other.flows}
        weights = {name: self._classes[name].weight for name in others}
        returned = sum(entry.tokens for entry in self._returned)
        return returned + _ahead(self._shares, others, weights, priority, inside, each.weight)

    def waiting_of(self, priority: str, tenant: str) -> int:
        """Requests in one tenant's line."""
        flow = self._classes[priority].flows.get(tenant)
        return 0 if flow is None else len(flow.entries)

    def lines(self) -> Iterator[tuple[float, int, Entry]]:
        """Of each tenant's line the weight of its class, its length and its newest entry."""
        for each in self._classes.values():
            for flow in each.flows.values():
                yield each.weight, len(flow.entries), flow.entries[-1]

    def __iter__(self) -> Iterator[Entry]:
        yield from self._returned
        for each in self._classes.values():
            for flow in each.flows.values():
                yield from flow.entries


def _ahead(
    shares: FairShares[str],
    queued: Mapping[str, float],
    weights: Mapping[str, float],
    key: str,
    own: float,
    weight: float,
) -> float:
    """Work before a newcomer of `key` that stands behind `own` of its own: of the others, what their tags let pass."""
    start = shares.tag(key) + own / weight
    return own + sum(
        min(work, max(0.0, (start - shares.tag(other)) * weights[other]))
        for other, work in queued.items()
        if other != key
    )
