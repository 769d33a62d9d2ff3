"""Prompts that workers are computing now. Pure apart from the injected clock.

Their blocks count as cached from dispatch on, so a second request with the same prefix goes to the same worker. The
worker's own events arrive within `EVENT_LAG_S` of the first token. A wrong credit costs a cache miss and is counted as
such.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from router.prefix_index.mirror import WorkerKey
from tandem.clock import Clock
from tandem.kvcache.blockhash import BlockHash

EVENT_LAG_S = 1.0
MAX_ENTRIES = 4096
MAX_COMPARED = 16  # the latest prompts with the same first block


@dataclass(slots=True, eq=False)
class _Entry:
    worker: WorkerKey
    hashes: Sequence[BlockHash]
    until_s: float | None = None  # None while it is computed


class InFlightPrefills:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_request: dict[Hashable, _Entry] = {}
        self._by_first_block: dict[BlockHash, deque[_Entry]] = {}
        self._oldest_first: deque[_Entry] = deque()

    def began(self, request: Hashable, worker: WorkerKey, hashes: Sequence[BlockHash]) -> None:
        """This prompt was dispatched to `worker`."""
        self.failed(request)
        if not hashes:
            return
        entry = self._by_request[request] = _Entry(worker, hashes)
        self._by_first_block.setdefault(hashes[0], deque()).append(entry)
        self._oldest_first.append(entry)
        self._forget()

    def computed(self, request: Hashable) -> None:
        """The first token of the request came."""
        self._until(request, self._clock.now_s() + EVENT_LAG_S)

    def failed(self, request: Hashable) -> None:
        """The request left the worker. No effect after `computed`."""
        self._until(request, self._clock.now_s())

    def credit(self, cached: dict[WorkerKey, int], hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """`cached` (leading blocks by worker) plus the blocks being computed."""
        entries = self._by_first_block.get(hashes[0]) if hashes else None
        if not entries:
            return cached
        found, now_s = dict(cached), self._clock.now_s()
        for _, entry in zip(range(MAX_COMPARED), reversed(entries), strict=False):
            if entry.until_s is None or entry.until_s > now_s:
                known = found.get(entry.worker, 0)
                if _shares_more(entry.hashes, hashes, known):
                    found[entry.worker] = _shared(entry.hashes, hashes)
        return found

    def __len__(self) -> int:
        return len(self._oldest_first)

    def _until(self, request: Hashable, until_s: float) -> None:
        if (entry := self._by_request.pop(request, None)) is not None:
            entry.until_s = until_s

    def _forget(self) -> None:
        now_s = self._clock.now_s()
        while self._oldest_first:
            oldest = self._oldest_first[0]
            is_over = oldest.until_s is not None and oldest.until_s <= now_s
            if not is_over and len(self._oldest_first) <= MAX_ENTRIES:
                return
            self._oldest_first.popleft()
            entries = self._by_first_block[oldest.hashes[0]]
            entries.remove(oldest)
            if not entries:
                del self._by_first_block[oldest.hashes[0]]


def _shares_more(a: Sequence[BlockHash], b: Sequence[BlockHash], blocks: int) -> bool:
    """Whether more than `blocks` leading blocks are equal. One comparison; mostly avoids the binary search."""
    return blocks < min(len(a), len(b)) and a[blocks] == b[blocks]


def _shared(a: Sequence[BlockHash], b: Sequence[BlockHash]) -> int:
    """The number of equal leading blocks. Hashes are chained: if two are equal, all before them are."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
