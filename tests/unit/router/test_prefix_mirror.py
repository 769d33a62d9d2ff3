from hypothesis import given
from hypothesis import strategies as st

from router.prefix_index.mirror import Applied, PrefixMirror, WorkerKey
from tandem.prefix_events import PrefixEvent, PrefixSnapshot

A1, A2, B1 = WorkerKey("a", 1), WorkerKey("a", 2), WorkerKey("b", 1)


def h(number: int) -> bytes:
    return number.to_bytes(16, "little")


CHAIN = [h(n) for n in range(8)]


def snapshot(epoch: int, count: int, seq: int = 0) -> PrefixSnapshot:
    return PrefixSnapshot(epoch, seq, tuple(CHAIN[:count]))


def test_match_counts_leading_blocks_of_every_worker() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    mirror.load("b", PrefixSnapshot(1, 0, (h(0), h(2), h(3))))
    assert mirror.match(CHAIN) == {A1: 3, B1: 1}
    assert mirror.match(CHAIN[:2]) == {A1: 2, B1: 1}
    assert mirror.match([h(99)]) == {}
    assert mirror.match([]) == {}


def test_removed_blocks_count_no_more() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    assert mirror.apply(A1, PrefixEvent(1, 1, False, (h(1),))) is Applied.OK
    assert mirror.match(CHAIN) == {A1: 1}
    assert mirror.apply(A1, PrefixEvent(1, 2, True, (h(1),))) is Applied.OK
    assert mirror.match(CHAIN) == {A1: 3}


def test_gap_gives_no_credit_until_a_snapshot() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3, seq=5))
    assert mirror.apply(A1, PrefixEvent(1, 7, True, (h(3),))) is Applied.GAP
    assert mirror.match(CHAIN) == {}
    assert mirror.seq(A1) is None
    assert len(mirror) == 0
    mirror.load("a", snapshot(1, 4, seq=7))
    assert mirror.match(CHAIN) == {A1: 4}


def test_event_already_in_the_snapshot_changes_nothing() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3, seq=5))
    assert mirror.apply(A1, PrefixEvent(1, 5, False, (h(0),))) is Applied.OLD
    assert mirror.match(CHAIN) == {A1: 3}


def test_event_of_another_epoch_is_not_applied() -> None:
    mirror = PrefixMirror()
    mirror.load("a", snapshot(1, 3))
    assert mirror.apply(A1, PrefixEvent(2, 1, True, (h(3),))) is Applied.OTHER_EPOCH


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
    mirror = PrefixMirror(max_entries=2)
    mirror.load("a", snapshot(1, 4))
    assert len(mirror) == 2
    assert mirror.match(CHAIN) == {A1: 2}


EVENTS = st.lists(
    st.tuples(st.sampled_from([A1, B1]), st.booleans(), st.lists(st.integers(0, 7), max_size=4)), max_size=40
)


@given(EVENTS, st.lists(st.integers(0, 7), max_size=6))
def test_mirror_equals_a_set_for_each_worker(events: list[tuple[WorkerKey, bool, list[int]]], query: list[int]) -> None:
    mirror = PrefixMirror()
    model: dict[WorkerKey, set[bytes]] = {A1: set(), B1: set()}
    seqs = {A1: 0, B1: 0}
    for key in model:
        mirror.load(key.worker_id, PrefixSnapshot(1, 0, ()))
    for key, stored, numbers in events:
        seqs[key] += 1
        hashes = tuple(h(number) for number in numbers)
        assert mirror.apply(key, PrefixEvent(1, seqs[key], stored, hashes)) is Applied.OK
        model[key] = model[key] | set(hashes) if stored else model[key] - set(hashes)
    wanted = [h(number) for number in query]
    for key, held in model.items():
        leading = next((depth for depth, each in enumerate(wanted) if each not in held), len(wanted))
        assert mirror.match(wanted).get(key, 0) == leading
