"""Every block is in exactly one state, nothing is handed out twice, and what is cached is found until it is evicted."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.errors import InternalError, KvExhausted
from tandem.kvcache.block_pool import BlockCounts, BlockHold, BlockPool, CacheEvent

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"
    LEASED = "leased"
    IN_USE = "in_use"


def state_of(pool: BlockPool, block: int) -> BlockState:
    """By the facts that a state is derived from."""
    if pool._uses[block]:
        return BlockState.IN_USE
    if pool._leases[block]:
        return BlockState.LEASED
    return BlockState.CACHED if pool._hash[block] is not None else BlockState.FREE


def fill(pool: BlockPool, *hashes: bytes) -> list[int]:
    """A finished request that left `hashes` cached."""
    blocks = pool.acquire([], len(hashes), BlockHold.USE)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.commit(block, block_hash)
    pool.release(blocks, BlockHold.USE)
    return blocks


def test_a_block_is_in_use_before_leased_before_cached_before_free() -> None:
    pool = BlockPool(2)
    (block,) = pool.acquire([], 1, BlockHold.LEASE)
    assert state_of(pool, block) is BlockState.LEASED
    pool.commit(block, A)
    assert pool.acquire([block], 0, BlockHold.USE) == [block]
    assert state_of(pool, block) is BlockState.IN_USE
    pool.release([block], BlockHold.USE)
    assert state_of(pool, block) is BlockState.LEASED
    pool.release([block], BlockHold.LEASE)
    assert state_of(pool, block) is BlockState.CACHED
    assert pool.counts() == BlockCounts(free=1, cached=1, leased=0, in_use=0, total=2)


def test_converting_a_hold_never_lets_go_of_the_block() -> None:
    pool = BlockPool(1)
    blocks = pool.acquire([], 1, BlockHold.USE)
    pool.convert(blocks, BlockHold.USE, BlockHold.LEASE)
    assert pool.counts().leased == 1
    pool.convert(blocks, BlockHold.LEASE, BlockHold.USE)
    assert pool.counts().in_use == 1
    assert pool.available() == 0


def test_the_longest_cached_prefix_is_found() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, A, B, C)
    assert pool.match([A, B, D]) == blocks[:2]
    assert pool.match([D, B]) == []


def test_free_blocks_go_before_cached_ones_and_a_chain_is_evicted_from_its_tail() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, A, B, C)
    (free,) = pool.acquire([], 1, BlockHold.USE)
    assert free not in blocks
    assert pool.acquire([], 1, BlockHold.USE) == [blocks[2]]
    assert pool.match([A, B, C]) == blocks[:2]


def test_what_was_used_last_is_evicted_last() -> None:
    pool = BlockPool(2)
    first, second = fill(pool, A), fill(pool, B)
    pool.acquire(first, 0, BlockHold.USE)
    pool.release(first, BlockHold.USE)
    assert pool.acquire([], 1, BlockHold.USE) == second
    assert pool.match([A]) == first


def test_of_two_blocks_with_one_content_the_first_stays_findable_and_the_second_becomes_free() -> None:
    pool = BlockPool(2)
    (first,) = pool.acquire([], 1, BlockHold.USE)
    (second,) = pool.acquire([], 1, BlockHold.USE)
    pool.commit(first, A)
    pool.commit(second, A)
    pool.release([first, second], BlockHold.USE)
    assert pool.match([A]) == [first]
    assert state_of(pool, second) is BlockState.FREE


def test_no_room_changes_nothing() -> None:
    pool = BlockPool(3)
    cached = fill(pool, A, B)
    before = pool.counts()
    with pytest.raises(KvExhausted, match="2 KV blocks are needed and 1 of 3"):
        pool.acquire(cached, 2, BlockHold.USE)  # the cached ones are wanted themselves: they make no room
    with pytest.raises(KvExhausted):
        pool.acquire([], 2, BlockHold.USE, spare=2)
    assert pool.counts() == before
    assert pool.match([A, B]) == cached


def test_events_tell_in_order_what_can_be_found() -> None:
    pool = BlockPool(2)
    fill(pool, A, B)
    pool.acquire([], 2, BlockHold.USE)
    assert pool.take_events() == [CacheEvent(True, (A, B)), CacheEvent(False, (B, A))]
    assert pool.take_events() == []


def test_our_own_mistakes_are_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(InternalError, match="not held"):
        pool.commit(0, A)
    blocks = pool.acquire([], 1, BlockHold.USE)
    with pytest.raises(InternalError, match="more often"):
        pool.release(blocks, BlockHold.LEASE)


class PoolMachine(RuleBasedStateMachine):
    """Requests that hold chains of blocks over a small pool, against a model of who holds what."""

    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.held: list[tuple[list[int], BlockHold]] = []
        self.findable: set[bytes] = set()

    def _holds(self, hold: BlockHold) -> Counter[int]:
        return Counter(block for blocks, how in self.held if how is hold for block in blocks)

    @rule(chain=st.integers(0, 3), length=st.integers(1, 6), hold=st.sampled_from(BlockHold))
    def start(self, chain: int, length: int, hold: BlockHold) -> None:
        hashes = [bytes([chain, index]) * 8 for index in range(length)]
        cached = self.pool.match(hashes)
        before, available = self.pool.counts(), self.pool.available()
        taken = {block for blocks, _ in self.held for block in blocks}
        try:
            blocks = self.pool.acquire(cached, length - len(cached), hold)
        except KvExhausted:
            assert self.pool.counts() == before
            assert self.pool.match(hashes) == cached
            assert length - len(cached) > available - sum(block not in taken for block in cached)
            return
        fresh = blocks[len(cached) :]
        assert blocks[: len(cached)] == cached
        assert not taken & set(fresh)
        assert len(set(blocks)) == length
        self.held.append((blocks, hold))
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.commit(block, block_hash)

    @rule(count=st.integers(1, 4))
    def start_uncommitted(self, count: int) -> None:
        if count <= self.pool.available():
            self.held.append((self.pool.acquire([], count, BlockHold.USE), BlockHold.USE))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        blocks, hold = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks, hold)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def convert(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        blocks, hold = self.held[index]
        other = BlockHold.LEASE if hold is BlockHold.USE else BlockHold.USE
        self.pool.convert(blocks, hold, other)
        self.held[index] = (blocks, other)

    @rule()
    def events_replay_to_what_is_findable(self) -> None:
        for event in self.pool.take_events():
            if event.stored:
                assert not self.findable & set(event.hashes)
                self.findable |= set(event.hashes)
            else:
                assert set(event.hashes) <= self.findable
                self.findable -= set(event.hashes)
        for block_hash in (bytes([chain, index]) * 8 for chain in range(4) for index in range(6)):
            assert bool(self.pool.match([block_hash])) == (block_hash in self.findable)

    @invariant()
    def every_block_is_in_the_one_state_its_holds_give(self) -> None:
        counts = self.pool.counts()
        uses, leases = self._holds(BlockHold.USE), self._holds(BlockHold.LEASE)
        states = Counter(state_of(self.pool, block) for block in range(self.SIZE))
        assert counts.conserved
        assert counts.in_use == states[BlockState.IN_USE] == len(uses)
        assert counts.leased == states[BlockState.LEASED] == len(leases.keys() - uses.keys())
        assert counts.free == states[BlockState.FREE]
        assert counts.cached == states[BlockState.CACHED]
        assert self.pool.available() == counts.free + counts.cached


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlockPoolProperties = PoolMachine.TestCase
