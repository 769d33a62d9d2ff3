import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.prefix_index.mirror import Applied, PrefixMirror, WorkerKey
from router.testing.index import SMALL_TABLE_BYTES
from tandem.kvcache.prefix_events import PrefixEvent, PrefixSnapshot, join_hashes, split_hashes

A1, A2, B1 = WorkerKey("a", 1), WorkerKey("a", 2), WorkerKey("b", 1)


def h(number: int) -> bytes:
    return number.to_bytes(16, "little")


CHAIN = [h(n) for n in range(8)]


def snapshot(epoch: int, count: int, seq: int = 0) -> PrefixSnapshot:
    return PrefixSnapshot(epoch, seq, join_hashes(CHAIN[:count]))


def test_match_counts_leading_blocks_of_every_worker() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    mirror.load("b", PrefixSnapshot(1, 0, h(0) + h(2) + h(3)))
    assert mirror.match(CHAIN) == {A1: 3, B1: 1}
    assert mirror.match(CHAIN[:2]) == {A1: 2, B1: 1}
    assert mirror.match([h(99)]) == {}
    assert mirror.match([]) == {}


def test_a_long_prompt_is_matched_to_the_block_wherever_the_parts_end_that_are_looked_up_at_once() -> None:
    prompt = [h(number) for number in range(5000)]
    held = [1, 511, 512, 513, 1535, 1536, 1537, 3583, 3584, 3585, 4999, 5000]
    mirror = PrefixMirror()
    for count in held:
        mirror.load(str(count), PrefixSnapshot(1, 0, join_hashes(prompt[:count])))
    assert mirror.match(prompt) == {WorkerKey(str(count), 1): count for count in held}


def test_removed_blocks_count_no_more() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    assert mirror.apply(A1, [PrefixEvent(1, 1, False, h(1))]) is Applied.OK
    assert mirror.match(CHAIN) == {A1: 1}
    assert mirror.apply(A1, [PrefixEvent(1, 2, True, h(1))]) is Applied.OK
    assert mirror.match(CHAIN) == {A1: 3}


def test_gap_gives_no_credit_until_a_snapshot() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3, seq=5))
    assert mirror.apply(A1, [PrefixEvent(1, 7, True, h(3))]) is Applied.GAP
    assert mirror.match(CHAIN) == {}
    assert mirror.seq(A1) is None
    assert len(mirror) == 0
    mirror.load("a", snapshot(1, 4, seq=7))
    assert mirror.match(CHAIN) == {A1: 4}


def test_event_already_in_the_snapshot_changes_nothing() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3, seq=5))
    assert mirror.apply(A1, [PrefixEvent(1, 5, False, h(0))]) is Applied.OK
    assert mirror.match(CHAIN) == {A1: 3}


def test_event_of_another_epoch_is_not_applied() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    assert mirror.apply(A1, [PrefixEvent(2, 1, True, h(3))]) is Applied.OTHER_EPOCH


def test_new_epoch_replaces_the_old() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    mirror.load("a", snapshot(2, 1))
    assert mirror.match(CHAIN) == {A2: 1}
    assert mirror.workers() == {A2}


def test_dropped_worker_leaves_nothing_behind() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    mirror.load("b", snapshot(1, 2))
    mirror.drop(A1)
    assert mirror.match(CHAIN) == {B1: 2}
    assert len(mirror) == 2


def test_full_mirror_loses_credit_but_never_invents_any() -> None:
    mirror = PrefixMirror(memory_bytes=SMALL_TABLE_BYTES)
    many = split_hashes(np.random.default_rng(7).bytes(16 * 10_000))
    mirror.load("a", PrefixSnapshot(1, 0, join_hashes(many)))
    assert len(mirror) + mirror.lost_blocks == len(many)
    assert mirror.lost_blocks > 2_000
    noted = [each for each in many if mirror.match([each])]
    assert len(noted) == len(mirror)
    assert mirror.apply(A1, [PrefixEvent(1, 1, False, join_hashes(many))]) is Applied.OK
    assert len(mirror) == 0
    assert not any(mirror.match([each]) for each in many)


def test_hundreds_of_workers_are_told_apart() -> None:
    mirror = PrefixMirror()
    for number in range(300):
        mirror.load(f"w{number}", snapshot(1, 1 + number % 8))
    mirror.drop(WorkerKey("w7", 1))
    found = mirror.match(CHAIN)
    assert found == {WorkerKey(f"w{number}", 1): 1 + number % 8 for number in range(300) if number != 7}


def test_worker_dropped_while_its_snapshot_loads_stays_away() -> None:
    mirror = PrefixMirror()
    steps = mirror.load_in_steps("a", PrefixSnapshot(1, 0, join_hashes(h(n) for n in range(20_000))))
    next(steps)
    assert mirror.match(CHAIN) == {A1: 8}, "what is loaded counts"
    mirror.drop(A1)
    assert list(steps) == []
    assert len(mirror) == 0


def test_last_word_on_a_block_counts_within_one_read() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 2))
    said = [(False, CHAIN[0]), (True, CHAIN[0]), (True, CHAIN[2]), (False, CHAIN[1]), (True, CHAIN[1])]
    assert mirror.apply(A1, [PrefixEvent(1, seq, *each) for seq, each in enumerate(said, 1)]) is Applied.OK
    assert mirror.match(CHAIN) == {A1: 3}
    said = [(True, CHAIN[3]), (False, CHAIN[3]), (False, CHAIN[1])]
    assert mirror.apply(A1, [PrefixEvent(1, seq, *each) for seq, each in enumerate(said, 6)]) is Applied.OK
    assert mirror.match(CHAIN) == {A1: 1}


READS = st.lists(
    st.tuples(
        st.sampled_from([A1, B1]),
        st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 7), max_size=4)), max_size=5),
    ),
    max_size=20,
)


@given(READS, st.lists(st.integers(0, 7), max_size=6))
def test_mirror_equals_a_set_for_each_worker(
    reads: list[tuple[WorkerKey, list[tuple[bool, list[int]]]]], query: list[int]
) -> None:
    mirror = PrefixMirror(memory_bytes=SMALL_TABLE_BYTES)
    model: dict[WorkerKey, set[bytes]] = {A1: set(), B1: set()}
    seqs = {A1: 0, B1: 0}
    for key in model:
        mirror.load(key.worker_id, PrefixSnapshot(1, 0, b""))
    for key, changes in reads:
        events = []
        for stored, numbers in changes:
            seqs[key] += 1
            hashes = [h(number) for number in numbers]
            events.append(PrefixEvent(1, seqs[key], stored, join_hashes(hashes)))
            model[key] = model[key] | set(hashes) if stored else model[key] - set(hashes)
        assert mirror.apply(key, events) is Applied.OK
    assert len(mirror) == len(model[A1] | model[B1])
    wanted = [h(number) for number in query]
    for key, held in model.items():
        leading = next((depth for depth, each in enumerate(wanted) if each not in held), len(wanted))
        assert mirror.match(wanted).get(key, 0) == leading
