"""Who of a large pool has least to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.simulator.least_loaded import LeastLoadedIndex

WORKERS = [f"w{number}" for number in range(8)]


def least_loaded(pool: LeastLoadedIndex, most: int, *chosen: str) -> list[str]:
    found = dict.fromkeys(chosen)
    pool.extend(found, most)
    return list(found)


def test_the_least_loaded_come_first_and_equals_as_they_came_to_their_load() -> None:
    pool = LeastLoadedIndex()
    for name, load in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        pool.note(name, load)
    assert least_loaded(pool, 3) == ["b", "d", "c"]
    pool.note("b", 1)
    assert least_loaded(pool, 4) == ["d", "c", "b", "a"]


def test_who_is_chosen_already_counts_and_is_not_added_again() -> None:
    pool = LeastLoadedIndex()
    for name in "abc":
        pool.note(name, 0)
    assert least_loaded(pool, 2, "b") == ["b", "a"]


def test_who_left_is_found_no_more_until_it_is_back() -> None:
    pool = LeastLoadedIndex()
    pool.note("a", 0)
    pool.note("b", 0)
    pool.forget("a")
    assert least_loaded(pool, 2) == ["b"]
    pool.note("a", 5)
    assert least_loaded(pool, 2) == ["b", "a"]


@given(st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(0, 3) | st.none(), st.integers(0, 8))))
def test_whatever_happened_before_the_least_loaded_are_those_of_the_least_loads(
    steps: list[tuple[str, int | None, int]],
) -> None:
    """A load of None: it leaves. After each step so many are looked for."""
    pool, loads = LeastLoadedIndex(), dict[str, int]()
    for name, load, most in steps:
        if load is None:
            pool.forget(name)
            loads.pop(name, None)
        else:
            pool.note(name, load)
            loads[name] = load
        found = least_loaded(pool, most)
        assert len(set(found)) == len(found)
        assert [loads[each] for each in found] == sorted(loads.values())[:most]
