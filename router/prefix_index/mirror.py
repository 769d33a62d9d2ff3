"""The prefix index in memory: which worker, in which epoch, holds which block hashes. Pure; the follower feeds it.

Tracks the workers (epoch, last event applied); a BlockTable holds the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from router.prefix_index.block_table import SLICE_BLOCKS, BlockTable, words_of
from tandem.kvcache.blockhash import HASH_BYTES, BlockHash
from tandem.kvcache.prefix_events import PrefixEvent, PrefixSnapshot

DEFAULT_MEMORY_BYTES = 64 << 20
FEW_OWNERS = 16  # up to this many bits are faster to find one by one; a popular prefix may have hundreds
MATCH_BLOCKS = 512  # in the first lookup: covers most prompts, and stops early for a long one with few cached blocks


class WorkerKey(NamedTuple):
    """One epoch of one worker."""

    worker_id: str
    epoch: int


class Applied(StrEnum):
    OK = "ok"
    GAP = "gap"  # events are missing; the worker needs a snapshot
    OTHER_EPOCH = "other_epoch"  # an event of another epoch; the worker needs a snapshot


@dataclass(slots=True)
class _Slot:
    owner: int  # its bit
    seq: int


class PrefixMirror:
    def __init__(self, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self._table = BlockTable(memory_bytes)
        self._slots: dict[WorkerKey, _Slot] = {}
        self._by_owner: dict[int, WorkerKey] = {}  # by bit number
        self._all_owners = 0

    def __len__(self) -> int:
        """Distinct hashes held anywhere. Iterates over all owner sets: for metrics, not for each request."""
        return len(self._table)

    @property
    def lost_blocks(self) -> int:
        """Blocks not recorded for lack of memory, since the start."""
        return self._table.lost_blocks

    def workers(self) -> frozenset[WorkerKey]:
        return frozenset(self._slots)

    def seq(self, worker: WorkerKey) -> int | None:
        """The last event applied; None if the worker needs a snapshot."""
        slot = self._slots.get(worker)
        return None if slot is None else slot.seq

    def load(self, worker_id: str, snapshot: PrefixSnapshot) -> WorkerKey:
        """Replaces a worker's blocks with its snapshot."""
        for _ in self.load_in_steps(worker_id, snapshot):
            pass
        return WorkerKey(worker_id, snapshot.epoch)

    def load_in_steps(self, worker_id: str, snapshot: PrefixSnapshot) -> Iterator[None]:
        """`load` in steps of about 2 ms; the caller may run other tasks between them.

        The worker gets credit for the blocks loaded so far. Apply no events before the last step. A `drop` in between
        ends the load.
        """
        for known in [key for key in self._slots if key.worker_id == worker_id]:
            self.drop(known)
        key = WorkerKey(worker_id, snapshot.epoch)
        slot = _Slot(~self._all_owners & (self._all_owners + 1), snapshot.seq)
        self._slots[key] = slot
        self._by_owner[_number(slot.owner)] = key
        self._all_owners |= slot.owner
        step = SLICE_BLOCKS * HASH_BYTES
        for start in range(0, len(snapshot.hashes), step):
            if self._slots.get(key) is not slot:
                return
            self._table.add(words_of(snapshot.hashes[start : start + step]), slot.owner)
            yield

    def apply(self, worker: WorkerKey, events: Sequence[PrefixEvent]) -> Applied:
        """Applies the next events of a worker together; skips events already applied.

        GAP and OTHER_EPOCH drop the worker: load a snapshot.
        """
        slot = self._slots.get(worker)
        if slot is None:
            return Applied.GAP
        seq = slot.seq
        fresh = []
        for event in events:
            if event.epoch != worker.epoch:
                self.drop(worker)
                return Applied.OTHER_EPOCH
            if event.seq > seq:
                if event.seq != seq + 1:
                    self.drop(worker)
                    return Applied.GAP
                seq += 1
                fresh.append(event)
        slot.seq = seq
        self._change(fresh, slot.owner)
        return Applied.OK

    def drop(self, worker: WorkerKey) -> None:
        """Removes a worker and its blocks."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            del self._by_owner[_number(slot.owner)]
            self._all_owners &= ~slot.owner
            self._table.drop(slot.owner)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """The number of leading blocks of `hashes` cached on each worker; omits workers with none."""
        found: dict[WorkerKey, int] = {}
        left = self._all_owners
        start, end = 0, MATCH_BLOCKS
        while left and start < len(hashes):
            for at, owners in self._table.owners(b"".join(hashes[start:end])):
                ended = left & ~owners
                if ended:
                    self._note(found, ended, start + at)
                    left &= owners
                    if not left:
                        return found
            start, end = end, end + 2 * (end - start)
        self._note(found, left, len(hashes))
        return found

    def _note(self, found: dict[WorkerKey, int], owners: int, depth: int) -> None:
        if depth:
            found |= dict.fromkeys([self._by_owner[number] for number in _numbers(owners)], depth)

    def _change(self, events: Sequence[PrefixEvent], owner: int) -> None:
        """Applies the net effect of the events, in at most two changes of the table."""
        keys = words_of(b"".join([event.hashes for event in events]))
        kinds = {event.stored for event in events}
        if len(kinds) == 1:
            (self._table.add if kinds.pop() else self._table.discard)(keys, owner)
        elif kinds:
            stored = np.repeat(
                [event.stored for event in events], [len(event.hashes) // HASH_BYTES for event in events]
            )
            last, where = np.unique(keys[::-1], return_index=True)  # the last event of a block wins
            holds = stored[::-1][where]
            self._table.discard(last[~holds], owner)
            self._table.add(last[holds], owner)


def _number(owner: int) -> int:
    return owner.bit_length() - 1


def _numbers(owners: int) -> list[int]:
    """The numbers of the set bits, lowest first."""
    if owners.bit_count() > FEW_OWNERS:
        raw = owners.to_bytes(-(-owners.bit_length() // 8), "little")
        numbers: list[int] = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").nonzero()[0].tolist()
        return numbers
    found = []
    while owners:
        owner = owners & -owners
        found.append(_number(owner))
        owners ^= owner
    return found
