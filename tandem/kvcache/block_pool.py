"""Which physical KV block holds what, and who holds it. Pure bookkeeping: the tensor lives in `engine/kv_pool.py`.

Every block is in exactly one state, derived from three facts and never stored:

    in_use   a running request uses it
    leased   else: a handoff holds it
    cached   else: it can be found by its hash, and may be evicted, the longest unused first
    free     else
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from tandem.blockhash import BlockHash
from tandem.errors import InternalError, KvExhausted


class Hold(StrEnum):
    USE = "use"
    LEASE = "lease"


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"
    LEASED = "leased"
    IN_USE = "in_use"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Every block is in exactly one state."""

    free: int
    cached: int
    leased: int
    in_use: int
    total: int

    @property
    def conserved(self) -> bool:
        return self.free + self.cached + self.leased + self.in_use == self.total


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Full blocks that became findable (`stored`) or no longer are, in order."""

    stored: bool
    hashes: tuple[BlockHash, ...]


class _Block:
    __slots__ = ("block_hash", "leases", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.leases = 0
        self.block_hash: BlockHash | None = None

    @property
    def state(self) -> BlockState:
        if self.uses:
            return BlockState.IN_USE
        if self.leases:
            return BlockState.LEASED
        return BlockState.CACHED if self.block_hash is not None else BlockState.FREE


class BlockPool:
    """All blocks of one rank group (the ranks of a worker use the same block numbers)."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, the longest unused first
        self._by_hash: dict[BlockHash, int] = {}
        self._counts = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._events: list[CacheEvent] = []

    def counts(self) -> BlockCounts:
        counts = self._counts
        return BlockCounts(
            free=counts[BlockState.FREE],
            cached=counts[BlockState.CACHED],
            leased=counts[BlockState.LEASED],
            in_use=counts[BlockState.IN_USE],
            total=len(self._blocks),
        )

    def available(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._free) + len(self._evictable)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of a chain. Holds nothing."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, cached: Sequence[int], fresh: int, hold: Hold, *, spare: int = 0) -> list[int]:
        """Holds the `cached` blocks (from `match`) and `fresh` new ones; returns the new ones.

        Raises:
            KvExhausted: fewer than `fresh` can be had, or `spare` would not be left after that; nothing is changed.
        """
        available = self.available() - sum(block in self._evictable for block in cached)
        if fresh + spare > available:
            raise KvExhausted(
                f"{fresh + spare} KV blocks are needed and {available} of {len(self._blocks)} can be had: "
                "retry when running requests have ended"
            )
        for block in cached:
            self._hold(block, hold, 1)
        new = [self._take() for _ in range(fresh)]
        for block in new:
            self._hold(block, hold, 1)
        return new

    def release(self, blocks: Iterable[int], hold: Hold) -> None:
        """Gives up one hold of each block. Given in table order: the tail of a chain is evicted first."""
        for block in reversed(list(blocks)):
            self._hold(block, hold, -1)

    def convert(self, blocks: Iterable[int], before: Hold, after: Hold) -> None:
        """Changes what kind of hold a request has; the blocks are held throughout."""
        uses = (after is Hold.USE) - (before is Hold.USE)
        for block in blocks:
            self._change(block, uses=uses, leases=-uses)

    def commit(self, block: int, block_hash: BlockHash) -> None:
        """A held block is full and holds `block_hash`'s tokens: from now on it can be found. Of two blocks with the
        same content the first stays findable."""
        if self._blocks[block].state in (BlockState.FREE, BlockState.CACHED):
            raise InternalError(f"block {block} is committed and nobody holds it")
        if self._blocks[block].block_hash is not None or block_hash in self._by_hash:
            return
        self._set(block, block_hash)
        self._by_hash[block_hash] = block
        self._events.append(CacheEvent(stored=True, hashes=(block_hash,)))

    def take_events(self) -> list[CacheEvent]:
        """What became findable or was evicted since the last call, neighbours of one kind merged."""
        runs = groupby(self._events, key=lambda event: event.stored)
        merged = [CacheEvent(stored, tuple(each for event in run for each in event.hashes)) for stored, run in runs]
        self._events = []
        return merged

    def state_of(self, block: int) -> BlockState:
        return self._blocks[block].state

    # --- one place each where a block changes ------------------------------------------------------------------

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._evictable.popitem(last=False)
        evicted = self._blocks[block].block_hash
        if evicted is None:
            raise InternalError(f"block {block} is evictable and has no hash")
        del self._by_hash[evicted]
        self._set(block, None)
        self._events.append(CacheEvent(stored=False, hashes=(evicted,)))
        return block

    def _set(self, block: int, block_hash: BlockHash | None) -> None:
        before = self._blocks[block].state
        self._blocks[block].block_hash = block_hash
        self._count(before, self._blocks[block].state)

    def _hold(self, block: int, hold: Hold, change: int) -> None:
        if hold is Hold.USE:
            self._change(block, uses=change, leases=0)
        else:
            self._change(block, uses=0, leases=change)

    def _change(self, block: int, uses: int, leases: int) -> None:
        held = self._blocks[block]
        before = held.state
        held.uses += uses
        held.leases += leases
        if held.uses < 0 or held.leases < 0:
            raise InternalError(f"block {block} was released more often than held")
        after = held.state
        if after is before:
            return
        self._count(before, after)
        if before is BlockState.CACHED:
            self._evictable.pop(block, None)
        if after is BlockState.CACHED:
            self._evictable[block] = None
        elif after is BlockState.FREE:
            self._free.append(block)

    def _count(self, before: BlockState, after: BlockState) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1
