"""The index's storage against a plain dict of sets, filled until it overflows."""

import itertools
import random

import numpy as np
import pytest

from router.prefix_index import block_table
from router.prefix_index.block_table import BlockTable, HashWords
from router.prefix_index.owner_sets import NO_OWNER, OwnerSets
from router.testing.index import SMALL_TABLE_BYTES
from tandem.errors import ConfigError
from tandem.native.prefix import prefix_library

HASHES = np.random.default_rng(7).integers(0, 1 << 64, size=1 << 19, dtype=np.uint64)
OWNERS = [1 << 0, 1 << 5, 1 << 63, 1 << 64, 1 << 200]


def keys(numbers: list[int]) -> HashWords:
    return HASHES[numbers]


def owners_of(table: BlockTable, numbers: list[int]) -> list[int]:
    hashes = np.stack((keys(numbers), keys(numbers) * np.uint64(3)), axis=1).tobytes()
    pairs = [*table.owners(hashes), (len(numbers), 0)]
    return [owners for (at, owners), (end, _) in itertools.pairwise(pairs) for _ in range(at, end)]


@pytest.fixture(params=["native", "numpy"], autouse=True)
def lookup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with both."""
    if request.param == "numpy":
        monkeypatch.setattr(block_table, "_native_runs", lambda slots, multiplier: None)
        return
    try:
        prefix_library()
    except ConfigError as error:  # where routers look up in numpy as well
        pytest.skip(str(error))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blocks", [50, 5_000])  # of 6,552 slots: buckets overflow, the overflow does not
def test_table_equals_a_dict_of_sets(seed: int, blocks: int) -> None:
    dice = random.Random(seed)
    table = BlockTable(SMALL_TABLE_BYTES * (1 if blocks < 1000 else 4))
    model: dict[int, int] = {}
    for _ in range(120):
        owner = dice.choice(OWNERS)
        changed = [dice.randrange(blocks) for _ in range(dice.choice([1, 3, 40, 2000]))]
        match dice.choice(["add", "add", "add", "discard", "drop"] if dice.random() < 0.2 else ["add", "discard"]):
            case "add":
                table.add(keys(changed), owner)
                model |= {each: model.get(each, 0) | owner for each in changed}
            case "discard":
                table.discard(keys(changed), owner)
                model |= {each: model.get(each, 0) & ~owner for each in changed}
            case "drop":
                table.drop(owner)
                model = {each: mask & ~owner for each, mask in model.items()}
        assert len(table) == sum(1 for mask in model.values() if mask)
    everything = list(range(blocks + 10))
    assert owners_of(table, everything) == [model.get(each, 0) for each in everything]
    assert table.lost_blocks == 0


def test_half_full_table_loses_nothing_and_an_overfull_one_counts_what_it_lost() -> None:
    table = BlockTable(1 << 20)
    room = (1 << 20) // 20  # what the configuration promises: 20 bytes for each block
    table.add(keys(list(range(room))), 1)
    assert table.lost_blocks == 0
    assert len(table) == room
    table.add(keys(list(range(room, 8 * room))), 2)
    assert len(table) + table.lost_blocks == 8 * room
    assert all(mask in (0, 1) for mask in owners_of(table, list(range(room))))


def test_blocks_of_a_dropped_owner_make_room_for_others() -> None:
    table = BlockTable(SMALL_TABLE_BYTES)
    for life in range(40):
        table.add(keys(list(range(life * 2400, life * 2400 + 2400))), 1)  # about 4 overflow, 40 may
        assert table.lost_blocks == 0, life
        table.drop(1)
        assert len(table) == 0


def test_sets_beyond_the_limit_lose_owners_and_invent_none() -> None:
    sets = OwnerSets(limit=3)
    first = sets.number_of(1)
    second = sets.number_of(2)
    assert first is not None
    assert second is not None
    sets.join(first, 5)
    sets.join(second, 5)
    assert sets.number_of(4) is None
    assert sets.with_owner(np.full(2, first), 2).tolist() == [first, first]
    assert sets.lost == 2
    assert sets.without_owner(np.full(5, first), 1).tolist() == [NO_OWNER] * 5
    assert sets.number_of(4) == first, "a number nobody carries is used again"
    assert sets.owned == 5


def test_dropped_owner_leaves_the_sets_it_shared() -> None:
    sets = OwnerSets(limit=10)
    both = sets.number_of(3)
    one = sets.number_of(2)
    assert both is not None
    assert one is not None
    sets.join(both, 1)
    sets.join(one, 1)
    sets.drop(1)
    assert (sets.mask(both), sets.mask(one)) == (2, 2)
    sets.drop(2)
    assert sets.vacant[[both, one]].all()
    assert sets.owned == 0
