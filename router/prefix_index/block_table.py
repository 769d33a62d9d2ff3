"""Which owners hold which blocks: a hash table in one array of 8-byte slots, looked up a whole prompt at a time.

A bucket is one cache line of eight slots. A slot has 40 bits of the hash as its tag and the 24-bit number of an owner
set. One gather looks up every block of a prompt for all owners. Blocks whose bucket is full go to a small dict. Memory
is fixed at construction. Blocks without room are not recorded, which loses credit but never invents any.
docs/decisions/0010-prefix-index-in-one-array.md gives the reasons.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from router.prefix_index.owner_sets import NO_OWNER, OwnerSets
from tandem.errors import ConfigError
from tandem.kvcache.blockhash import HASH_BYTES
from tandem.native.prefix import PrefixRuns, prefix_library

log = logging.getLogger(__name__)

SLICE_BLOCKS = 1 << 12  # changed at once: bounds the memory of a change, and takes about 2 ms of the event loop

_SLOTS = 8
_BUCKET_BYTES = 64
_SET_BITS = 24
_MAX_SET = np.uint64((1 << _SET_BITS) - 1)
_TAG_SHIFT = np.uint64(_SET_BITS)
_HALF = np.uint64(32)
_USED = np.uint64(1 << 63)  # set in every tag: no tag equals an empty slot. The bucket already implies this bit.
_TABLE_SHARE = 0.8  # of the memory; the overflow and the sets get a tenth each
_ENTRY_BYTES = 160  # of a dict entry with key and value: an overflowing block, or a set

HashWords = NDArray[np.uint64]
Slots = NDArray[np.int64]


def words_of(hashes: bytes) -> HashWords:
    """The table's keys [n] of concatenated block hashes [n x 16 bytes]: the first half of each."""
    return np.frombuffer(hashes, dtype="<u8")[:: HASH_BYTES // 8]


class BlockTable:
    """Owners are bits; sets of owners are bit masks."""

    def __init__(self, memory_bytes: int) -> None:
        buckets = max(1, int(memory_bytes * _TABLE_SHARE) // _BUCKET_BYTES)
        space = np.zeros(buckets * _SLOTS + _SLOTS, dtype=np.uint64)
        first = -space.ctypes.data % _BUCKET_BYTES // 8  # aligned: a bucket in two cache lines costs two misses
        self._slots = space[first : first + buckets * _SLOTS]
        self._rows = self._slots.reshape(buckets, _SLOTS)
        self._buckets = np.uint64(buckets)
        # Random per process: clients cannot aim blocks at one bucket.
        self._multiplier = np.uint64(secrets.randbits(64) | 1)
        self._native = _native_runs(self._slots, int(self._multiplier))
        others = int(memory_bytes * (1 - _TABLE_SHARE) / 2) // _ENTRY_BYTES
        self._sets = OwnerSets(limit=min(max(others, 64), int(_MAX_SET)))
        self._overflow: dict[int, int] = {}
        self._max_overflow = others
        self._lost = 0

    def __len__(self) -> int:
        """Blocks with at least one owner."""
        return self._sets.owned + len(self._overflow)

    @property
    def lost_blocks(self) -> int:
        """Blocks not recorded for lack of room, since construction."""
        return self._lost + self._sets.lost

    def owners(self, hashes: bytes) -> Iterator[tuple[int, int]]:
        """The owners of each block of concatenated hashes, as runs: (index of the first block, owners)."""
        runs = self._runs(hashes) if self._native is None else self._native.find(hashes)
        for run, (at, number) in enumerate(runs, start=1):
            if number != NO_OWNER or not self._overflow:
                yield at, self._sets.mask(number)
            else:
                end = runs[run][0] if run < len(runs) else None
                for each, key in enumerate((words_of(hashes)[at:end] * self._multiplier).tolist(), start=at):
                    yield each, self._overflow.get(key, 0)

    def _runs(self, hashes: bytes) -> list[tuple[int, int]]:
        """PrefixRuns.find in numpy."""
        if not hashes:
            return []
        numbers = self._probe(words_of(hashes) * self._multiplier)[2].min(axis=0)
        numbers *= numbers <= _MAX_SET
        where = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist()]
        return list(zip(where, numbers[where].tolist(), strict=True))

    def add(self, keys: HashWords, owner: int) -> None:
        """Records that `owner` holds these blocks. Microseconds for a few keys; then proportional to their number."""
        for start in range(0, len(keys), SLICE_BLOCKS):
            hashed = keys[start : start + SLICE_BLOCKS] * self._multiplier
            slots, held = self._find(hashed)
            if len(slots):
                self._change(slots, owner, adding=True)
            if not held.all():
                self._insert(self._add_overflowing(hashed[~held], owner), owner)

    def discard(self, keys: HashWords, owner: int) -> None:
        """Records that `owner` no longer holds these blocks. Ignores blocks that it never held."""
        for start in range(0, len(keys), SLICE_BLOCKS):
            hashed = keys[start : start + SLICE_BLOCKS] * self._multiplier
            slots, held = self._find(hashed)
            if len(slots):
                self._change(slots, owner, adding=False)
            if self._overflow:
                for each in hashed[~held].tolist():
                    self._set_overflowing(each, self._overflow.get(each, 0) & ~owner)

    def drop(self, owner: int) -> None:
        """Removes `owner` from all blocks."""
        self._sets.drop(owner)
        for each, mask in [pair for pair in self._overflow.items() if pair[1] & owner]:
            self._set_overflowing(each, mask & ~owner)

    def _place(self, hashed: HashWords) -> tuple[Slots, HashWords]:
        """The bucket and the tag of each key."""
        return (((hashed >> _HALF) * self._buckets) >> _HALF).view(np.int64), (hashed << _TAG_SHIFT) | _USED

    def _probe(self, hashed: HashWords) -> tuple[Slots, HashWords, HashWords]:
        """Buckets, tags, and the XOR of each of the 8 slots with the tag [8, n].

        A result of at most _MAX_SET is a hit and equals the number of the owner set.
        """
        buckets, tags = self._place(hashed)
        differences = np.ascontiguousarray(self._rows.take(buckets, axis=0, mode="clip").T)
        differences ^= tags
        return buckets, tags, differences

    def _find(self, hashed: HashWords) -> tuple[Slots, NDArray[np.bool_]]:
        """The distinct slots of the keys found, and a mask of the keys found [n]."""
        buckets, _, differences = self._probe(hashed)
        held = (differences.min(axis=0) - np.uint64(1)) < _MAX_SET  # an empty slot's 0 wraps around
        return _distinct(buckets[held] * _SLOTS + differences[:, held].argmin(axis=0)), held

    def _change(self, slots: Slots, owner: int, *, adding: bool) -> None:
        entries = self._slots[slots]
        numbers = (entries & _MAX_SET).view(np.int64)
        news = self._sets.with_owner(numbers, owner) if adding else self._sets.without_owner(numbers, owner)
        changed = (entries & ~_MAX_SET) | news.view(np.uint64)
        self._slots[slots] = np.where(news == NO_OWNER, np.uint64(0), changed)

    def _insert(self, hashed: HashWords, owner: int) -> None:
        """Inserts blocks without a slot. If two choose the same slot, one wins and the other chooses again."""
        number = self._sets.number_of(owner)
        if number is None:
            self._lost += len(hashed)
            return
        while len(hashed):
            buckets, tags = self._place(hashed)
            numbers = (self._rows.take(buckets, axis=0, mode="clip") & _MAX_SET).view(np.int64)
            vacant = self._sets.vacant.take(numbers)
            chosen = vacant.argmax(axis=1)
            room = vacant[np.arange(len(chosen)), chosen]
            for each in hashed[~room].tolist():
                self._set_overflowing(each, owner)
            slots = (buckets * _SLOTS + chosen)[room]
            entries = (tags | np.uint64(number))[room]
            taken = _distinct(slots.copy())
            self._sets.leave((self._slots[taken] & _MAX_SET).view(np.int64))
            self._slots[slots] = entries
            self._sets.join(number, len(taken))
            hashed = hashed[room][self._slots[slots] != entries]

    def _add_overflowing(self, hashed: HashWords, owner: int) -> HashWords:
        """Adds the owner to blocks in the overflow; returns the other blocks."""
        if not self._overflow:
            return hashed
        inside = [each in self._overflow for each in hashed.tolist()]
        for each in hashed[inside].tolist():
            self._set_overflowing(each, self._overflow[each] | owner)
        return hashed[np.logical_not(inside)]

    def _set_overflowing(self, each: int, owners: int) -> None:
        if not owners:
            self._overflow.pop(each, None)
        elif each in self._overflow or len(self._overflow) < self._max_overflow:
            self._overflow[each] = owners
        else:
            self._lost += 1


def _native_runs(slots: HashWords, multiplier: int) -> PrefixRuns | None:
    try:
        return PrefixRuns(slots, multiplier, prefix_library())
    except ConfigError as error:
        log.warning("no native prefix lookup, using numpy, which is slower: %s", error.message)
        return None


def _distinct(slots: Slots) -> Slots:
    """The distinct slots in order; sorts `slots` in place. Much faster than np.unique for the few slots of an event."""
    slots.sort()
    first = np.ones(len(slots), dtype=np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=first[1:])
    return slots[first]
