"""The state of each physical KV block. Pure bookkeeping: `engine/kv_pool.py` holds the tensor.

Every block is in exactly one state, derived from three facts and never stored. The first match applies:

    in_use   a running request holds it
    leased   a handoff holds it
    cached   it can be found by its hash, and may be evicted, least recently used first
    free     none of these

With a host tier, evicted blocks move there and stay findable. They get a block of the pool again when acquired.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.errors import InternalError, KvExhausted
from tandem.kvcache.blockhash import BlockHash
from tandem.kvcache.host_tier import NO_TIER, BlockCopies, HostTier, TierCounts

Found = int | BlockHash  # a cached block, or the hash of a block that is only in the host tier


class BlockHold(StrEnum):
    USE = "use"
    LEASE = "lease"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks in each state."""

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
    """Full blocks that became findable (`stored`) or stopped being findable, in order."""

    stored: bool
    hashes: tuple[BlockHash, ...]


class BlockPool:
    """All blocks of a worker, whose ranks use the same block numbers."""

    def __init__(self, num_blocks: int, tier: HostTier | None = None) -> None:
        self._tier = tier
        self._total = num_blocks
        self._uses, self._leases = [0] * num_blocks, [0] * num_blocks  # number of holds of each block
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._untouched = 0  # blocks from this one on were never held; they are allocated before other free blocks
        self._free: deque[int] = deque()
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._by_hash: dict[BlockHash, int] = {}
        self._in_use = self._leased = 0
        self._events: list[tuple[bool, list[BlockHash]]] = []  # runs of the same kind

    def counts(self) -> BlockCounts:
        return BlockCounts(self._num_free(), len(self._evictable), self._leased, self._in_use, self._total)

    def _num_free(self) -> int:
        return self._total - self._untouched + len(self._free)

    def available(self) -> int:
        """Blocks that could be allocated now."""
        return self._num_free() + len(self._evictable)

    def tier_counts(self) -> TierCounts:
        return NO_TIER if self._tier is None else self._tier.counts()

    def match(self, hashes: Sequence[BlockHash]) -> list[Found]:
        """The longest cached prefix of a chain. Does not hold the blocks."""
        found: list[Found] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is not None:
                found.append(block)
            elif self._tier is not None and block_hash in self._tier:
                found.append(block_hash)
            else:
                break
        return found

    def acquire(self, found: Sequence[Found], fresh: int, hold: BlockHold, *, spare: int = 0) -> list[int]:
        """Holds the blocks that `match` found and `fresh` new ones, and returns all of them in this order.

        Before any of them is read or written, the copies from `take_copies` must be done.

        Raises:
            KvExhausted: too few blocks are available, counting `spare` blocks that must remain. Nothing is changed.
        """
        cached = [each for each in found if isinstance(each, int)]
        needed = len(found) - len(cached) + fresh
        available = self.available() - sum(block in self._evictable for block in cached)
        if needed + spare > available:
            raise KvExhausted(
                f"{needed + spare} KV blocks are needed and {available} of {self._total} are available: "
                "retry after running requests end"
            )
        self._hold(cached, hold)
        if needed == fresh:
            return cached + self._take(fresh, hold)
        return self._restore(found, needed, hold)

    def take_copies(self) -> BlockCopies | None:
        """Copies between pool and host tier; see `HostTier.take_copies`."""
        return None if self._tier is None else self._tier.take_copies()

    def release(self, blocks: Iterable[int], hold: BlockHold) -> None:
        """Releases one hold of each block. `blocks` are in table order, so that the tail of a chain is evicted
        first."""
        self._drop_holds(reversed(list(blocks)), hold)

    def convert(self, blocks: Iterable[int], before: BlockHold, after: BlockHold) -> None:
        """Changes the kind of a request's hold. The blocks stay held throughout."""
        if before is after:
            return
        blocks = list(blocks)
        self._hold(blocks, after)
        self._drop_holds(blocks, before)

    def commit(self, block: int, block_hash: BlockHash) -> None:
        """Makes a held, full block findable by `block_hash`. Of two blocks with the same content, the first stays
        findable."""
        if not self._uses[block] and not self._leases[block]:
            raise InternalError(f"block {block} is committed but not held")
        if self._hash[block] is not None or block_hash in self._by_hash:
            return
        self._hash[block], self._by_hash[block_hash] = block_hash, block
        if self._tier is None or block_hash not in self._tier:
            self._record_event(True, block_hash)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Makes blocks no longer findable, in the pool and in its tier. Holds of them stay."""
        for block_hash in hashes:
            block = self._by_hash.pop(block_hash, None)
            if block is not None:
                self._hash[block] = None
                if block in self._evictable:
                    del self._evictable[block]
                    self._free.append(block)
            was_below = self._tier is not None and self._tier.forget(block_hash)
            if block is not None or was_below:
                self._record_event(False, block_hash)

    def take_events(self) -> list[CacheEvent]:
        """Changes of findable blocks since the last call. Consecutive changes of one kind are merged."""
        events = [CacheEvent(stored, tuple(hashes)) for stored, hashes in self._events]
        self._events = []
        return events

    # --- state changes; optimised, because the simulator runs them most often ------------------------------------

    def _take(self, count: int, hold: BlockHold) -> list[int]:
        """Allocates `count` blocks, held and not findable."""
        new = [self._vacate() for _ in range(count)]
        held, _ = self._held(hold)
        for block in new:
            held[block] = 1
        self._count(hold, count)
        return new

    def _restore(self, found: Sequence[Found], count: int, hold: BlockHold) -> list[int]:
        """Allocates `count` blocks and restores into them the found blocks that are only in the host tier."""
        tier = self._tier
        assert tier is not None  # only a tier can have found hashes
        below = [each for each in found if not isinstance(each, int)]
        for block_hash in below:  # before evictions below look for a slot
            tier.claim(block_hash)
        new = self._take(count, hold)
        for block_hash, block in zip(below, new, strict=False):
            tier.restore(block_hash, block)
            self._hash[block], self._by_hash[block_hash] = block_hash, block
        rest = iter(new)
        return [each if isinstance(each, int) else next(rest) for each in found] + list(rest)

    def _vacate(self) -> int:
        """A block that is neither held nor findable; evicts one if needed."""
        if self._untouched < self._total:
            self._untouched += 1
            return self._untouched - 1
        if self._free:
            return self._free.popleft()
        block, _ = self._evictable.popitem(last=False)
        evicted = self._hash[block]
        if evicted is None:
            raise InternalError(f"block {block} is evictable and has no hash")
        del self._by_hash[evicted]
        self._hash[block] = None
        lost = evicted if self._tier is None else self._tier.keep(evicted, block)
        if lost is not None and lost not in self._by_hash:
            self._record_event(False, lost)
        return block

    def _hold(self, blocks: Iterable[int], hold: BlockHold) -> None:
        """Holds blocks that are held or cached. Cached ones stop being evictable."""
        held, others = self._held(hold)
        new = shared = 0
        for block in blocks:
            held[block] += 1
            if held[block] > 1:
                continue
            if others[block]:
                shared += 1
            else:
                new += 1
                self._evictable.pop(block, None)
        self._count(hold, new)
        self._share(hold, shared)

    def _drop_holds(self, blocks: Iterable[int], hold: BlockHold) -> None:
        held, others = self._held(hold)
        gone = shared = 0
        for block in blocks:
            if held[block] > 1:
                held[block] -= 1
                continue
            if not held[block]:
                raise InternalError(f"block {block} was released more often than it was held")
            held[block] = 0
            if others[block]:
                shared += 1
                continue
            gone += 1
            if self._hash[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None
        self._count(hold, -gone)
        self._share(hold, -shared)

    def _held(self, hold: BlockHold) -> tuple[list[int], list[int]]:
        """(this kind's holds per block, the other kind's)."""
        return (self._uses, self._leases) if hold is BlockHold.USE else (self._leases, self._uses)

    def _count(self, hold: BlockHold, blocks: int) -> None:
        if hold is BlockHold.USE:
            self._in_use += blocks
        else:
            self._leased += blocks

    def _share(self, hold: BlockHold, blocks: int) -> None:
        """Moves blocks between the counts after they gained holds of both kinds: a block with both is in use."""
        if hold is BlockHold.USE:
            self._in_use += blocks
            self._leased -= blocks

    def _record_event(self, stored: bool, block_hash: BlockHash) -> None:
        if not self._events or self._events[-1][0] is not stored:
            self._events.append((stored, []))
        self._events[-1][1].append(block_hash)
