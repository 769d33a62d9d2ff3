"""The second tier of the prefix cache, in host memory: which slot holds which block that left the pool, and the copies
that make it so. Pure bookkeeping; the tensor lives in `engine/host_pool.py`.

A block that comes back to the pool keeps its slot, which becomes the next to be overwritten: as long as that has not
happened, the block can leave the pool once more without a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from tandem.kvcache.blockhash import BlockHash


class BlockCopies(msgspec.Struct, frozen=True, array_like=True):
    """What every rank copies before it writes to any block: first each of `out_blocks` to its slot of `out_slots`, then
    each of `in_slots` to its block of `in_blocks`. No slot and no block is written twice, and no slot that is copied in
    is written by anything but its own content."""

    out_blocks: list[int]
    out_slots: list[int]
    in_slots: list[int]
    in_blocks: list[int]


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Slots, and blocks that were copied so far: out of the pool, and back into it."""

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
    """All slots of one rank group (the ranks of a worker use the same slot numbers)."""

    def __init__(self, num_slots: int) -> None:
        self._total = num_slots
        self._untouched = 0  # slots from this one on were never used; others stay so
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()  # what they hold, the next to be overwritten first
        self._claimed: dict[BlockHash, int] = {}  # slots that are copied in next, and not overwritten before
        self._outs: dict[int, int] = {}  # slot → block, to be copied
        self._ins: dict[BlockHash, int] = {}  # → block, of claimed slots
        self._blocks_out = self._blocks_in = 0

    def counts(self) -> TierCounts:
        used = len(self._slots) + len(self._claimed)
        return TierCounts(self._total - self._untouched, used, self._total, self._blocks_out, self._blocks_in)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slots or block_hash in self._claimed

    def keep(self, block_hash: BlockHash, block: int) -> BlockHash | None:
        """`block` leaves the pool. Returns the hash that leaves the tier for it: its own if all slots are claimed."""
        if block_hash in self._claimed:  # it leaves again before it was copied in
            del self._ins[block_hash]
            self._slots[block_hash] = self._claimed.pop(block_hash)
            return None
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        lost = None
        if self._untouched < self._total:
            slot = self._untouched
            self._untouched += 1
        elif self._slots:
            lost, slot = self._slots.popitem(last=False)
        else:
            return block_hash
        self._slots[block_hash] = slot
        self._outs[slot] = block
        return lost

    def claim(self, block_hash: BlockHash) -> None:
        """It is going to be restored: whatever is kept meanwhile leaves its slot alone."""
        self._claimed[block_hash] = self._slots.pop(block_hash)

    def restore(self, block_hash: BlockHash, block: int) -> None:
        """A claimed hash gets a block of the pool."""
        self._ins[block_hash] = block

    def take_copies(self) -> BlockCopies | None:
        """What is to be copied before any block taken from the pool meanwhile is written to; None: nothing."""
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
        for block_hash in self._ins:  # in table order: the tail of a chain is overwritten first
            self._slots[block_hash] = self._claimed.pop(block_hash)
            self._slots.move_to_end(block_hash, last=False)
        self._outs, self._ins = {}, {}
        return copies
