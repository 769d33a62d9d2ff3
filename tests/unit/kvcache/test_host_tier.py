"""What leaves the pool is found in the host tier and comes back with its content, whatever is overwritten meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.errors import KvExhausted
from tandem.kvcache.block_pool import BlockHold, BlockPool, CacheEvent
from tandem.kvcache.host_tier import BlockCopies, HostTier, TierCounts

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def fill(pool: BlockPool, *hashes: bytes) -> list[int]:
    """A finished request that left `hashes` cached."""
    blocks = pool.acquire(pool.match(hashes), len(hashes) - len(pool.match(hashes)), BlockHold.USE)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.commit(block, block_hash)
    pool.release(blocks, BlockHold.USE)
    return blocks


def test_an_evicted_block_goes_to_the_tier_and_comes_back_to_another_block() -> None:
    pool = BlockPool(2, HostTier(2))
    fill(pool, A, B)
    assert pool.acquire([], 1, BlockHold.USE) == [1]
    assert pool.take_copies() == BlockCopies([1], [0], [], [])
    assert pool.match([A, B]) == [0, B]
    pool.release([1], BlockHold.USE)
    assert pool.acquire([0, B], 0, BlockHold.USE) == [0, 1]
    assert pool.take_copies() == BlockCopies([], [], [0], [1])
    assert pool.take_copies() is None
    assert pool.match([A, B]) == [0, 1]
    assert pool.tier_counts() == TierCounts(free=1, used=1, total=2, blocks_out=1, blocks_in=1)


def test_a_block_that_came_back_leaves_again_without_a_copy_while_its_slot_lasts() -> None:
    pool = BlockPool(1, HostTier(2))
    fill(pool, A)
    fill(pool, B)
    pool.take_copies()
    pool.release(pool.acquire([A], 0, BlockHold.USE), BlockHold.USE)
    assert pool.take_copies() == BlockCopies([0], [1], [0], [0])  # B goes before A comes, in that order
    pool.acquire([], 1, BlockHold.USE)
    assert pool.take_copies() is None
    assert pool.match([A]) == [A]


def test_a_forgotten_block_is_found_nowhere_and_its_slot_is_used_again() -> None:
    pool = BlockPool(2, HostTier(2))
    fill(pool, A, B)
    fill(pool, C, D)
    pool.take_copies()
    pool.take_events()
    pool.forget([A, B, C])
    assert pool.take_events() == [CacheEvent(False, (A, B, C))]
    assert pool.match([A]) == pool.match([B]) == pool.match([C]) == []
    assert pool.match([D]) != []
    assert pool.tier_counts().free == 2
    assert pool.tier_counts().conserved
    assert pool.counts().free == 1
    assert pool.counts().conserved
    fill(pool, A, B)
    assert pool.take_copies() is not None
    assert pool.tier_counts().used == 1
    assert pool.tier_counts().conserved


def test_a_forgotten_block_stays_held_and_is_free_after() -> None:
    pool = BlockPool(2)
    held = pool.acquire([], 2, BlockHold.USE)
    for block, block_hash in zip(held, (A, B), strict=True):
        pool.commit(block, block_hash)
    pool.forget([B, D])
    assert pool.counts().in_use == 2
    pool.release(held, BlockHold.USE)
    assert (pool.counts().free, pool.counts().cached) == (1, 1)
    assert pool.take_events() == [CacheEvent(True, (A, B)), CacheEvent(False, (B,))]


def test_the_slot_of_a_block_that_came_back_is_overwritten_before_others_and_nothing_is_lost() -> None:
    pool = BlockPool(2, HostTier(2))
    fill(pool, A, B)
    pool.release(pool.acquire([], 2, BlockHold.USE), BlockHold.USE)
    pool.release(pool.acquire([A], 0, BlockHold.USE), BlockHold.USE)
    pool.take_copies()
    fill(pool, C)
    pool.take_events()
    pool.acquire([0, 1], 0, BlockHold.USE)
    pool.release([1], BlockHold.USE)  # C goes, where A was
    pool.acquire([], 1, BlockHold.USE)
    assert [len(pool.match([each])) for each in (A, B, C)] == [1, 1, 1]
    assert pool.take_events() == []


def test_only_what_leaves_both_tiers_is_told_as_removed() -> None:
    pool = BlockPool(1, HostTier(1))
    fill(pool, A)
    fill(pool, B)
    fill(pool, C)
    assert pool.take_events() == [CacheEvent(True, (A, B)), CacheEvent(False, (A,)), CacheEvent(True, (C,))]
    fill(pool, D)
    assert pool.take_events() == [CacheEvent(False, (B,)), CacheEvent(True, (D,))]


def test_a_block_computed_anew_while_the_tier_has_it_is_not_told_twice() -> None:
    pool = BlockPool(1, HostTier(1))
    fill(pool, A)
    pool.release(pool.acquire([], 1, BlockHold.USE), BlockHold.USE)
    (block,) = pool.acquire([], 1, BlockHold.USE)
    pool.commit(block, A)
    assert pool.take_events() == [CacheEvent(True, (A,))]


def test_a_slot_that_is_wanted_is_not_overwritten_by_what_makes_room_for_it() -> None:
    pool = BlockPool(1, HostTier(1))
    fill(pool, A)
    fill(pool, B)
    pool.take_copies()
    pool.take_events()
    assert pool.acquire([A], 0, BlockHold.USE) == [0]
    assert pool.take_copies() == BlockCopies([], [], [0], [0])
    assert pool.take_events() == [CacheEvent(False, (B,))]


def test_a_block_that_leaves_again_before_it_was_copied_in_is_found_as_before() -> None:
    pool = BlockPool(1, HostTier(1))
    fill(pool, A)
    pool.release(pool.acquire([], 1, BlockHold.USE), BlockHold.USE)
    pool.take_copies()
    pool.release(pool.acquire([A], 0, BlockHold.USE), BlockHold.USE)
    (block,) = pool.acquire([], 1, BlockHold.USE)
    assert pool.take_copies() is None  # the slot has it still
    pool.commit(block, B)
    pool.release([block], BlockHold.USE)
    assert pool.acquire([A], 0, BlockHold.USE) == [0]
    assert pool.take_copies() == BlockCopies([], [], [0], [0])
    assert pool.take_events()[-1] == CacheEvent(False, (B,))


class TierMachine(RuleBasedStateMachine):
    """Requests over a small pool and a small tier, whose memories hold the hashes of what they should hold."""

    BLOCKS = 8

    @initialize(slots=st.integers(1, 10))
    def begin(self, slots: int) -> None:
        self.slots = slots
        self.pool = BlockPool(self.BLOCKS, HostTier(slots))
        self.memory: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.held: list[tuple[list[int], BlockHold]] = []
        self.unwritten: list[tuple[list[int], list[bytes], int]] = []  # blocks, hashes, how many were found
        self.findable: set[bytes] = set()

    @rule(chain=st.integers(0, 3), length=st.integers(1, 6), hold=st.sampled_from(BlockHold))
    def start(self, chain: int, length: int, hold: BlockHold) -> None:
        hashes = [bytes([chain, index]) * 8 for index in range(length)]
        found = self.pool.match(hashes)
        before, tier = self.pool.counts(), self.pool.tier_counts()
        taken = {block for blocks, _ in self.held for block in blocks}
        try:
            blocks = self.pool.acquire(found, length - len(found), hold)
        except KvExhausted:
            assert (self.pool.counts(), self.pool.tier_counts()) == (before, tier)
            assert self.pool.match(hashes) == found
            return
        assert len(set(blocks)) == length
        assert not taken & {block for block in blocks if block not in found}
        self.held.append((blocks, hold))
        self.unwritten.append((blocks, hashes, len(found)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Also before its copies were made: it was cancelled."""
        index = data.draw(st.integers(0, len(self.held) - 1))
        blocks, hold = self.held.pop(index)
        self.unwritten = [each for each in self.unwritten if each[0] is not blocks]
        self.pool.release(blocks, hold)

    @rule()
    def copy_and_write(self) -> None:
        if copies := self.pool.take_copies():
            assert_distinct(copies.out_slots, copies.in_blocks, range(self.slots), range(self.BLOCKS))
            for block, slot in zip(copies.out_blocks, copies.out_slots, strict=True):
                self.host[slot] = self.memory[block]
            for slot, block in zip(copies.in_slots, copies.in_blocks, strict=True):
                self.memory[block] = self.host[slot]
        for blocks, hashes, found in self.unwritten:
            assert [self.memory[block] for block in blocks[:found]] == hashes[:found]
        for blocks, hashes, found in self.unwritten:
            for block, block_hash in zip(blocks[found:], hashes[found:], strict=True):
                self.memory[block] = block_hash
                self.pool.commit(block, block_hash)
        self.unwritten.clear()

    @rule()
    def events_replay_to_what_is_findable(self) -> None:
        events = self.pool.take_events()
        for event in events:
            if event.stored:
                assert not self.findable & set(event.hashes)
                self.findable |= set(event.hashes)
            else:
                assert set(event.hashes) <= self.findable
                self.findable -= set(event.hashes)
        for block_hash in (bytes([chain, index]) * 8 for chain in range(4) for index in range(6)):
            assert bool(self.pool.match([block_hash])) == (block_hash in self.findable)
        if any(not event.stored for event in events):
            assert self.pool.tier_counts().free == 0  # nothing is lost while there is a slot

    @invariant()
    def every_slot_and_every_block_is_accounted_for(self) -> None:
        if hasattr(self, "pool"):
            counts = self.pool.tier_counts()
            assert counts.conserved
            assert self.pool.counts().conserved
            assert counts.total == self.slots


def assert_distinct(slots: list[int], blocks: list[int], all_slots: Iterable[int], all_blocks: Iterable[int]) -> None:
    assert len(set(slots)) == len(slots)
    assert len(set(blocks)) == len(blocks)
    assert set(slots) <= set(all_slots)
    assert set(blocks) <= set(all_blocks)


TierMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestHostTierProperties = TierMachine.TestCase
