"""Which physical KV block holds what, and who holds it. Pure bookkeeping: the tensor lives in `engine/kv_pool.py`.

Every block is in exactly one state, derived from three facts and never stored:

    in_use   a running request uses it
    leased   else: a handoff holds it
    cached   else: it can be found by its hash, and may be evicted, the longest unused first
    free     else

With a host tier, what is evicted goes there, can be found as before, and gets a block again when it is acquired.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.errors import InternalError, KvExhausted
from tandem.kvcache.blockhash import BlockHash
from tandem.kvcache.host_tier import NO_TIER, BlockCopies, HostTier, TierCounts

Found = int | BlockHash  # a cached block, or the hash of one that only the host tier has


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


class BlockPool:
    """All blocks of one rank group (the ranks of a worker use the same block numbers)."""

    def __init__(self, num_blocks: int, tier: HostTier | None = None) -> None:
        self._tier = tier
        self._total = num_blocks
        self._uses, self._leases = [0] * num_blocks, [0] * num_blocks  # how many holds there are of each block
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._untouched = 0  # blocks from this one on were never held, and go before the others that are free
        self._free: deque[int] = deque()
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, the longest unused first
        self._by_hash: dict[BlockHash, int] = {}
        self._in_use = self._leased = 0
        self._events: list[tuple[bool, list[BlockHash]]] = []  # runs of one kind

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
        """The longest cached prefix of a chain. Holds nothing."""
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

    def acquire(self, found: Sequence[Found], fresh: int, hold: Hold, *, spare: int = 0) -> list[int]:
        """Holds what `match` found and `fresh` new blocks; returns all of them, in this order. What `take_copies` gives
        is to be done before any of them is read or written.

        Raises:
            KvExhausted: fewer can be had, or `spare` would not be left after that; nothing is changed.
        """
        cached = [each for each in found if isinstance(each, int)]
        needed = len(found) - len(cached) + fresh
        available = self.available() - sum(block in self._evictable for block in cached)
        if needed + spare > available:
            raise KvExhausted(
                f"{needed + spare} KV blocks are needed and {available} of {self._total} can be had: "
                "retry when running requests have ended"
            )
        self._hold(cached, hold)
        if needed == fresh:
            return cached + self._take(fresh, hold)
        return self._restore(found, needed, hold)

    def take_copies(self) -> BlockCopies | None:
        """Between pool and host tier, as `HostTier.take_copies`."""
        return None if self._tier is None else self._tier.take_copies()

    def release(self, blocks: Iterable[int], hold: Hold) -> None:
        """Gives up one hold of each block. Given in table order: the tail of a chain is evicted first."""
        self._let_go(reversed(list(blocks)), hold)

    def convert(self, blocks: Iterable[int], before: Hold, after: Hold) -> None:
        """Changes what kind of hold a request has; the blocks are held throughout."""
        if before is after:
            return
        blocks = list(blocks)
        self._hold(blocks, after)
        self._let_go(blocks, before)

    def commit(self, block: int, block_hash: BlockHash) -> None:
        """A held block is full and holds `block_hash`'s tokens: from now on it can be found. Of two blocks with the
        same content the first stays findable."""
        if not self._uses[block] and not self._leases[block]:
            raise InternalError(f"block {block} is committed and nobody holds it")
        if self._hash[block] is not None or block_hash in self._by_hash:
            return
        self._hash[block], self._by_hash[block_hash] = block_hash, block
        if self._tier is None or block_hash not in self._tier:
            self._tell(True, block_hash)

    def take_events(self) -> list[CacheEvent]:
        """What became findable or no longer is since the last call, neighbours of one kind merged."""
        events = [CacheEvent(stored, tuple(hashes)) for stored, hashes in self._events]
        self._events = []
        return events

    def state_of(self, block: int) -> BlockState:
        if self._uses[block]:
            return BlockState.IN_USE
        if self._leases[block]:
            return BlockState.LEASED
        return BlockState.CACHED if self._hash[block] is not None else BlockState.FREE

    # --- where a block changes; kept short, since the simulator does nothing more often -------------------------

    def _take(self, count: int, hold: Hold) -> list[int]:
        """So many blocks, held, that nobody can find."""
        new = [self._vacate() for _ in range(count)]
        held, _ = self._held(hold)
        for block in new:
            held[block] = 1
        self._count(hold, count)
        return new

    def _restore(self, found: Sequence[Found], count: int, hold: Hold) -> list[int]:
        """Takes `count` blocks, and of these gives one to each that only the host tier has."""
        tier = self._tier
        assert tier is not None  # else nothing else could have found them
        below = [each for each in found if not isinstance(each, int)]
        for block_hash in below:  # before what is evicted now looks for a slot
            tier.claim(block_hash)
        new = self._take(count, hold)
        for block_hash, block in zip(below, new, strict=False):
            tier.restore(block_hash, block)
            self._hash[block], self._by_hash[block_hash] = block_hash, block
        rest = iter(new)
        return [each if isinstance(each, int) else next(rest) for each in found] + list(rest)

    def _vacate(self) -> int:
        """A block nobody holds and nobody can find."""
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
            self._tell(False, lost)
        return block

    def _hold(self, blocks: Iterable[int], hold: Hold) -> None:
        """Blocks that are held or cached: free ones are taken."""
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

    def _let_go(self, blocks: Iterable[int], hold: Hold) -> None:
        held, others = self._held(hold)
        gone = shared = 0
        for block in blocks:
            if held[block] > 1:
                held[block] -= 1
                continue
            if not held[block]:
                raise InternalError(f"block {block} was released more often than held")
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

    def _held(self, hold: Hold) -> tuple[list[int], list[int]]:
        """How many of these holds each block has, and how many of the other kind."""
        return (self._uses, self._leases) if hold is Hold.USE else (self._leases, self._uses)

    def _count(self, hold: Hold, blocks: int) -> None:
        if hold is Hold.USE:
            self._in_use += blocks
        else:
            self._leased += blocks

    def _share(self, hold: Hold, blocks: int) -> None:
        """So many blocks with holds of the other kind gained one of this: a block with both is in use."""
        if hold is Hold.USE:
            self._in_use += blocks
            self._leased -= blocks

    def _tell(self, stored: bool, block_hash: BlockHash) -> None:
        if not self._events or self._events[-1][0] is not stored:
            self._events.append((stored, []))
        self._events[-1][1].append(block_hash)
