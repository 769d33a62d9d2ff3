"""The prefix index in memory: which worker life holds which block hashes. Pure; the follower feeds it.

One dict from hash to a bit mask of workers answers for every worker in one pass over a prompt's hashes. An entry
costs about 100 bytes; beyond `max_entries` new hashes are not noted, which loses credit but never invents any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.blockhash import BlockHash
from tandem.prefix_events import PrefixEvent, PrefixSnapshot

DEFAULT_MAX_ENTRIES = 8 << 20


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """One life of one worker."""

    worker_id: str
    epoch: int


class Applied(StrEnum):
    OK = "ok"
    OLD = "old"  # already known; nothing changed
    GAP = "gap"  # events are missing: the worker counts for nothing until a snapshot
    OTHER_EPOCH = "other_epoch"


@dataclass(slots=True)
class _Slot:
    bit: int
    seq: int


class PrefixMirror:
    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        self._masks: dict[BlockHash, int] = {}
        self._slots: dict[WorkerKey, _Slot] = {}
        self._max_entries = max_entries

    def __len__(self) -> int:
        """Distinct hashes held anywhere."""
        return len(self._masks)

    def workers(self) -> frozenset[WorkerKey]:
        return frozenset(self._slots)

    def seq(self, worker: WorkerKey) -> int | None:
        """The last event applied; None when the worker needs a snapshot."""
        slot = self._slots.get(worker)
        return None if slot is None else slot.seq

    def load(self, worker_id: str, snapshot: PrefixSnapshot) -> WorkerKey:
        """Replaces everything known of a worker by its snapshot."""
        for known in [key for key in self._slots if key.worker_id == worker_id]:
            self.drop(known)
        key = WorkerKey(worker_id, snapshot.epoch)
        slot = _Slot(self._free_bit(), snapshot.seq)
        self._slots[key] = slot
        self._add(slot.bit, snapshot.hashes)
        return key

    def apply(self, worker: WorkerKey, event: PrefixEvent) -> Applied:
        """Applies the next event of a worker. After GAP or OTHER_EPOCH load a snapshot."""
        slot = self._slots.get(worker)
        if event.epoch != worker.epoch:
            return Applied.OTHER_EPOCH
        if slot is None or event.seq > slot.seq + 1:
            self.drop(worker)
            return Applied.GAP
        if event.seq <= slot.seq:
            return Applied.OLD
        slot.seq = event.seq
        if event.stored:
            self._add(slot.bit, event.hashes)
        else:
            self._remove(slot.bit, event.hashes)
        return Applied.OK

    def drop(self, worker: WorkerKey) -> None:
        """Forgets a worker. One pass over the whole index: for deaths and resyncs, not for every event."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._remove(slot.bit, [key for key, mask in self._masks.items() if mask & slot.bit])

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """Leading blocks of `hashes` cached on each worker; workers with none are left out."""
        found: dict[WorkerKey, int] = {}
        alive = 0
        for slot in self._slots.values():
            alive |= slot.bit
        for depth, block_hash in enumerate(hashes):
            still = alive & self._masks.get(block_hash, 0)
            if still != alive:
                self._note(found, alive & ~still, depth)
                alive = still
                if not alive:
                    return found
        self._note(found, alive, len(hashes))
        return found

    def _note(self, found: dict[WorkerKey, int], bits: int, depth: int) -> None:
        if depth and bits:
            found.update((key, depth) for key, slot in self._slots.items() if slot.bit & bits)

    def _free_bit(self) -> int:
        used = 0
        for slot in self._slots.values():
            used |= slot.bit
        return ~used & (used + 1)

    def _add(self, bit: int, hashes: Sequence[BlockHash]) -> None:
        masks = self._masks
        for block_hash in hashes:
            mask = masks.get(block_hash)
            if mask is not None:
                masks[block_hash] = mask | bit
            elif len(masks) < self._max_entries:
                masks[block_hash] = bit

    def _remove(self, bit: int, hashes: Sequence[BlockHash]) -> None:
        masks = self._masks
        for block_hash in hashes:
            mask = masks.get(block_hash, 0) & ~bit
            if mask:
                masks[block_hash] = mask
            else:
                masks.pop(block_hash, None)
