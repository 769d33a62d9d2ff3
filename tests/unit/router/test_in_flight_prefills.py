"""Prompts count as cached where they are being computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.prefix_index.in_flight_prefills import EVENT_LAG_S, MAX_ENTRIES, InFlightPrefills
from router.prefix_index.mirror import WorkerKey
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.testing.models import FakeClock

P0, P1 = WorkerKey("p0", 1), WorkerKey("p1", 1)
BLOCK = 4


def hashes(tokens: list[int]) -> list[bytes]:
    return hash_blocks(tokens, BLOCK, HashKey("model"))


HELLO = hashes(list(range(40)))


def test_a_prompt_counts_from_dispatch_until_its_event_must_be_there() -> None:
    clock = FakeClock(0.0)
    prefills = InFlightPrefills(clock)
    prefills.began("a", P0, HELLO)
    assert prefills.credit({P1: 2}, HELLO) == {P0: 10, P1: 2}
    clock.advance(1000)
    assert prefills.credit({}, HELLO) == {P0: 10}, "however long it takes"
    prefills.computed("a")
    clock.advance(0.9 * EVENT_LAG_S)
    assert prefills.credit({}, HELLO) == {P0: 10}
    clock.advance(0.2 * EVENT_LAG_S)
    assert prefills.credit({P0: 3}, HELLO) == {P0: 3}, "what the worker says counts"


def test_what_left_its_worker_counts_no_more_and_may_be_elsewhere() -> None:
    prefills = InFlightPrefills(FakeClock(0.0))
    prefills.began("a", P0, HELLO)
    prefills.failed("a")
    assert prefills.credit({}, HELLO) == {}
    prefills.began("a", P0, HELLO)
    prefills.began("a", P1, HELLO)
    assert prefills.credit({}, HELLO) == {P1: 10}


def test_the_end_of_a_request_leaves_what_it_computed() -> None:
    prefills = InFlightPrefills(FakeClock(0.0))
    prefills.began("a", P0, HELLO)
    prefills.computed("a")
    prefills.failed("a")
    assert prefills.credit({}, HELLO) == {P0: 10}


def test_more_that_is_cached_already_is_not_made_less() -> None:
    prefills = InFlightPrefills(FakeClock(0.0))
    prefills.began("a", P0, HELLO[:2])
    assert prefills.credit({P0: 5}, HELLO) == {P0: 5}


def test_a_prompt_of_less_than_a_block_has_nothing_to_find() -> None:
    prefills = InFlightPrefills(FakeClock(0.0))
    prefills.began("a", P0, [])
    assert prefills.credit({P0: 1}, []) == {P0: 1}


def test_it_is_bounded_and_forgets_what_is_over() -> None:
    clock = FakeClock(0.0)
    prefills = InFlightPrefills(clock)
    for number in range(MAX_ENTRIES + 100):
        prefills.began(number, P0, hashes([number] * BLOCK))
    assert len(prefills) == MAX_ENTRIES
    for number in range(MAX_ENTRIES + 100):
        prefills.computed(number)
    clock.advance(EVENT_LAG_S)
    prefills.began("last", P1, HELLO)
    assert len(prefills) == 1
    assert prefills.credit({}, HELLO) == {P1: 10}


@given(
    st.lists(st.tuples(st.sampled_from([P0, P1]), st.lists(st.integers(0, 1), max_size=24)), max_size=8),
    st.lists(st.integers(0, 1), max_size=24),
)
def test_credit_is_the_longest_common_beginning(others: list[tuple[WorkerKey, list[int]]], mine: list[int]) -> None:
    prefills = InFlightPrefills(FakeClock(0.0))
    expected: dict[WorkerKey, int] = {}
    wanted = hashes(mine)
    for number, (worker, tokens) in enumerate(others):
        theirs = hashes(tokens)
        prefills.began(number, worker, theirs)
        shared = 0
        while shared < min(len(theirs), len(wanted)) and theirs[shared] == wanted[shared]:
            shared += 1
        expected[worker] = max(expected.get(worker, 0), shared)
    found = prefills.credit({}, wanted)
    assert found == {worker: blocks for worker, blocks in expected.items() if blocks}
