"""The prefix cache's second tier, in host memory: which slot holds which evicted block, and the copies to make.

Pure bookkeeping: `engine/host_pool.py` holds the tensor. A block that returns to the pool keeps its slot, which is the
next to be overwritten. Until then, the block can be evicted again without a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from tandem.kvcache.blockhash import BlockHash


class BlockCopies(msgspec.Struct, frozen=True, array_like=True):
    """Copies that every rank makes before it writes to any block.

    First each of `out_blocks` is copied to its slot of `out_slots`, then each of `in_slots` to its block of
    `in_blocks`. No slot and no block is written twice, and a slot that is copied in is written only with its own
    content.
    """

    out_blocks: list[int]
    out_slots: list[int]
    in_slots: list[int]
    in_blocks: list[int]


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Number of slots by state, and of blocks copied so far out of the pool and back into it."""

    free: int
    used: int
    total: int
    blocks_out: int = 0
    blocks_in: int = 0

    @property
    def conserved(self) -> bool:
        return self.free + self.used == self.total


NO_TIER = TierCounts(0, 0, 0)


class HostTier:
    """All slots of a worker, whose ranks use the same slot numbers."""

    def __init__(self, num_slots: int) -> None:
        self._total = num_slots
        self._untouched = 0  # slots from this one on were never used
        self._forgotten: list[int] = []  # used slots that are free again
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()  # slots by content, the next to be overwritten first
        self._claimed: dict[BlockHash, int] = {}  # slots that the next copies read, so they cannot be overwritten
        self._outs: dict[int, int] = {}  # slot → block, copies out of the pool
        self._ins: dict[BlockHash, int] = {}  # claimed hash → block, copies into the pool
        self._blocks_out = self._blocks_in = 0

    def counts(self) -> TierCounts:
        used = len(self._slots) + len(self._claimed)
        free = self._total - self._untouched + len(self._forgotten)
        return TierCounts(free, used, self._total, self._blocks_out, self._blocks_in)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slots or block_hash in self._claimed

    def keep(self, block_hash: BlockHash, block: int) -> BlockHash | None:
        """Keeps a block that leaves the pool. Returns the hash that leaves the tier: `block_hash` if all slots are
        claimed."""
        if block_hash in self._claimed:  # evicted again before it was copied in
            del self._ins[block_hash]
            self._slots[block_hash] = self._claimed.pop(block_hash)
            return None
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        lost = None
        if self._forgotten:
            slot = self._forgotten.pop()
        elif self._untouched < self._total:
            slot = self._untouched
            self._untouched += 1
        elif self._slots:
            lost, slot = self._slots.popitem(last=False)
        else:
            return block_hash
        self._slots[block_hash] = slot
        self._outs[slot] = block
        return lost

    def forget(self, block_hash: BlockHash) -> bool:
        """Frees the slot of a block that is not claimed. Returns whether it had one."""
        slot = self._slots.pop(block_hash, None)
        if slot is None:
            return False
        self._forgotten.append(slot)
        return True

    def claim(self, block_hash: BlockHash) -> None:
        """Protects a hash's slot until it is restored."""
        self._claimed[block_hash] = self._slots.pop(block_hash)

    def restore(self, block_hash: BlockHash, block: int) -> None:
        """Assigns a block of the pool to a claimed hash."""
        self._ins[block_hash] = block

    def take_copies(self) -> BlockCopies | None:
        """Copies to make before any block that was allocated since the last call is written; None: no copies."""
        if not self._outs and not self._ins:
            return None
        copies = BlockCopies(
            out_blocks=list(self._outs.values()),
            out_slots=list(self._outs),
            in_slots=[self._claimed[block_hash] for block_hash in self._ins],
            in_blocks=list(self._ins.values()),
        )
        self._blocks_out += len(self._outs)
        self._blocks_in += len(self._ins)
        for block_hash in self._ins:  # in table order, so that the tail of a chain is overwritten first
            self._slots[block_hash] = self._claimed.pop(block_hash)
            self._slots.move_to_end(block_hash, last=False)
        self._outs, self._ins = {}, {}
        return copies
