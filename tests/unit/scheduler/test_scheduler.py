"""What runs, in which order, under which budget; who gives way when there are no blocks, and who fails."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import ContextExceeded, InputError, InternalError, KvExhausted
from tandem.scheduler import scheduler
from tandem.scheduler.plan import ExportRange, StepPlan
from tests.unit.scheduler.conftest import next_token

MakeWorld = Any  # the `World` class of conftest.py


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def ran(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """(start, count) by request."""
    return {chunk.sequence.request_id: (chunk.start, chunk.count) for chunk in plan.chunks}


def test_a_long_prompt_is_computed_in_chunks_under_the_budget(make_world: MakeWorld) -> None:
    world = make_world(budget=16)
    world.add("r", prompt(40), max_tokens=1)
    plans = [world.step() for _ in range(3)]
    assert [ran(plan)["r"] for plan in plans] == [(0, 16), (16, 16), (32, 8)]
    assert [plan.chunks[0].samples for plan in plans] == [False, False, True]
    assert world.at_rest()


def test_decodes_go_before_prompts_even_those_that_came_earlier(make_world: MakeWorld) -> None:
    world = make_world(budget=16, blocks=32)
    joining = world.reserve("joined", prompt(4, 50), max_tokens=9)
    world.add("long", prompt(60))
    world.step()
    world.fill(joining)
    assert ran(world.step()) == {"joined": (4, 1), "long": (16, 15)}


def test_prompts_run_first_come_first_served_and_share_a_step(make_world: MakeWorld) -> None:
    world = make_world(budget=16)
    for index, length in enumerate((6, 20, 3)):
        world.add(str(index), prompt(length, 100 * index))
    assert ran(world.step()) == {"0": (0, 6), "1": (0, 10)}
    assert ran(world.step()) == {"0": (6, 1), "1": (10, 10), "2": (0, 3)}


def test_of_prompts_that_are_alike_one_is_computed(make_world: MakeWorld) -> None:
    world = make_world(budget=64, blocks=64)
    for name in ("first", "second", "third"):
        world.add(name, prompt(14))
    world.add("other", prompt(5, 50))
    assert ran(world.step()) == {"first": (0, 14), "other": (0, 5)}, "nobody else is held up"
    assert ran(world.step()) == {"first": (14, 1), "other": (5, 1), "second": (12, 2), "third": (12, 2)}
    world.run()
    assert world.answers["first"] == world.answers["second"] == world.answers["third"]
    assert world.at_rest()


def test_a_long_prompt_is_followed_to_its_end(make_world: MakeWorld) -> None:
    world = make_world(budget=16)
    for name in ("first", "second"):
        world.add(name, prompt(40), max_tokens=1)
    plans = [ran(world.step()) for _ in range(4)]
    assert plans == [{"first": (0, 16)}, {"first": (16, 16)}, {"first": (32, 8)}, {"second": (36, 4)}]


@pytest.mark.parametrize(
    ("alike", "use_prefix_cache"), [(4, True), (14, False)], ids=["little in common", "may not use the cache"]
)
def test_prompts_with_little_to_gain_do_not_wait(make_world: MakeWorld, alike: int, use_prefix_cache: bool) -> None:
    world = make_world(budget=64)
    world.add("first", prompt(14))
    world.add("second", prompt(alike) + prompt(14 - alike, 50), use_prefix_cache=use_prefix_cache)
    assert ran(world.step()) == {"first": (0, 14), "second": (0, 14)}


def test_who_follows_a_cancelled_request_takes_its_place(make_world: MakeWorld) -> None:
    world = make_world(budget=16)
    for name in ("first", "second", "third"):
        world.add(name, prompt(40), max_tokens=1)
    world.step()
    world.cancel("first")
    assert ran(world.step()) == {"second": (16, 16)}


def test_no_more_requests_run_than_allowed(make_world: MakeWorld) -> None:
    world = make_world(max_running=2)
    for index in range(3):
        world.add(str(index), prompt(3, 10 * index), max_tokens=2)
    assert set(ran(world.step())) == {"0", "1"}
    world.step()
    assert set(ran(world.step())) == {"2"}


def test_more_decodes_than_budget_take_turns(make_world: MakeWorld) -> None:
    world = make_world(budget=3, blocks=32, max_running=5)
    for index in range(5):
        world.fill(world.reserve(str(index), prompt(4, 10 * index), max_tokens=7))
    for _ in range(10):
        world.step()
    world.run()
    steps = {name: len(answer) for name, answer in world.answers.items()}
    assert steps == dict.fromkeys("01234", 6)
    assert world.at_rest()


def test_a_wholly_cached_prompt_still_computes_its_last_block(make_world: MakeWorld) -> None:
    world = make_world()
    world.add("a", prompt(8), max_tokens=1)
    world.run()
    again = world.add("b", prompt(8), max_tokens=1)
    assert ran(world.step()) == {"b": (4, 4)}
    assert again.cached_tokens == 4
    assert world.answers["a"] == world.answers["b"]


def test_a_request_that_forbids_it_finds_nothing_in_the_cache(make_world: MakeWorld) -> None:
    world = make_world()
    world.add("a", prompt(8), max_tokens=1)
    world.run()
    world.add("b", prompt(8), max_tokens=1, use_prefix_cache=False)
    assert ran(world.step()) == {"b": (0, 8)}


def test_answers_are_cached_as_their_blocks_fill(make_world: MakeWorld) -> None:
    world = make_world()
    sequence = world.add("a", prompt(6), max_tokens=4)
    world.run()
    assert len(world.pool.match(sequence.hashes(2))) == 2


# --- too few blocks ------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_is_computed_again(make_world: MakeWorld) -> None:
    world = make_world(blocks=5)
    old = world.add("old", prompt(8), max_tokens=9)
    young = world.add("young", prompt(7, 50), max_tokens=9)
    expected = make_world(blocks=50)
    expected.add("old", prompt(8), max_tokens=9)
    expected.add("young", prompt(7, 50), max_tokens=9)
    expected.run()
    finished = []
    while world.scheduler.has_work:
        world.step()
        finished += [s.request_id for s in (old, young) if s.generated == 9 and s.request_id not in finished]
    assert finished == ["old", "young"]
    assert world.answers == expected.answers
    assert world.at_rest()


def test_a_prompt_is_begun_once_although_it_is_computed_again(make_world: MakeWorld) -> None:
    world = make_world(blocks=5)
    world.add("old", prompt(8), max_tokens=9)
    world.add("young", prompt(7, 50), max_tokens=9)
    begun = []
    while world.scheduler.has_work:
        begun += world.step().began
    assert world.scheduler.preemptions > 0
    assert begun == ["old", "young"]


def test_a_lone_request_that_outgrows_the_pool_fails_and_the_next_runs(make_world: MakeWorld) -> None:
    world = make_world(blocks=4)
    world.add("big", prompt(10), max_tokens=50)
    world.add("small", prompt(5, 50), max_tokens=2)
    world.run()
    assert set(world.failed) == {"big"}
    assert isinstance(world.failed["big"], KvExhausted)
    assert len(world.answers["small"]) == 2
    assert world.at_rest()


def test_what_can_never_fit_is_refused_at_once(make_world: MakeWorld) -> None:
    world = make_world(blocks=4)
    with pytest.raises(ContextExceeded, match="4 KV blocks"):
        world.add("r", prompt(16))
    with pytest.raises(ContextExceeded, match="1000"):
        world.add("r", prompt(1000))
    world.add("r", prompt(4))
    with pytest.raises(InputError, match="unused id"):
        world.add("r", prompt(4))


def test_reservations_count_towards_the_requests_a_worker_takes(make_world: MakeWorld) -> None:
    world = make_world(blocks=32, max_running=2)
    world.fill(world.reserve("0", prompt(4), max_tokens=7))
    world.reserve("1", prompt(4, 10))
    with pytest.raises(KvExhausted, match="2 requests"):
        world.reserve("2", prompt(4, 20))


def test_requests_wait_idly_for_blocks_that_handoffs_hold(make_world: MakeWorld) -> None:
    world = make_world(blocks=4)
    world.reserve("handoff", prompt(12))
    world.add("r", prompt(7, 50), max_tokens=2)
    assert not world.step().chunks
    assert not world.scheduler.has_work  # until something is released
    assert world.scheduler.waiting == 1
    assert world.cancel("handoff")
    assert world.scheduler.has_work
    world.run()
    assert len(world.answers["r"]) == 2
    assert world.at_rest()


def test_handoffs_are_refused_while_others_wait_for_blocks_but_not_afterwards(make_world: MakeWorld) -> None:
    world = make_world(blocks=4)
    world.reserve("first", prompt(8))
    world.add("r", prompt(11, 50))
    world.step()
    with pytest.raises(KvExhausted, match="wait"):
        world.reserve("second", prompt(4, 90))
    world.cancel("r")
    world.reserve("second", prompt(4, 90))


def test_a_stalled_prompt_keeps_what_it_has_while_others_run(make_world: MakeWorld) -> None:
    world = make_world(blocks=8, budget=8)
    world.fill(world.reserve("old", prompt(12), max_tokens=5))
    long = world.add("long", prompt(24, 100), max_tokens=1)
    progress = []
    while world.scheduler.has_work:
        world.step()
        progress.append(long.computed)
    assert progress == sorted(progress)
    assert not world.failed
    assert len(world.answers["long"]) == 1


# --- import and export ---------------------------------------------------------------------------------------------


def test_reserving_leases_only_what_is_not_cached(make_world: MakeWorld) -> None:
    world = make_world()
    world.add("warm", prompt(8), max_tokens=1)
    world.run()
    sequence = world.reserve("r", prompt(8))
    assert sequence.committed == 2  # whole: nothing is computed here
    assert world.pool.counts().leased == 2
    world.fill(sequence)
    world.run()
    assert world.at_rest()


def test_imported_blocks_are_found_only_after_the_join(make_world: MakeWorld) -> None:
    world = make_world()
    sequence = world.reserve("r", prompt(8))
    assert world.pool.match(sequence.hashes(2)) == []
    world.fill(sequence)
    assert len(world.pool.match(sequence.hashes(2))) == 2


def test_the_first_token_sampled_elsewhere_counts(make_world: MakeWorld) -> None:
    world = make_world()
    world.fill(world.reserve("r", prompt(5), max_tokens=3))
    world.run()
    assert len(world.answers["r"]) == 2
    single = world.reserve("single", prompt(5), max_tokens=1)
    with pytest.raises(InputError, match="more than one token"):
        world.fill(single)
    assert world.cancel("single")
    assert world.at_rest()


def test_joining_and_releasing_need_the_right_stage(make_world: MakeWorld) -> None:
    world = make_world()
    world.add("r", prompt(4))
    with pytest.raises(InternalError, match="is not"):
        world.scheduler.join("r", 1)
    with pytest.raises(InternalError, match="is not"):
        world.scheduler.release_export("r")
    with pytest.raises(InternalError):
        world.scheduler.join("nobody", 1)


def ranges_of(world: Any) -> list[tuple[int, int, int, bool, bool]]:
    exported: list[ExportRange] = world.ranges.get("r", [])
    return [(r.first_block, len(r.block_ids), r.last_block_tokens, r.in_cache, r.is_last) for r in exported]


@pytest.mark.parametrize(
    ("length", "warm", "start", "expected"),
    [
        (3, 0, 0, [(0, 1, 3, False, True)]),
        (8, 0, 0, [(0, 2, 4, False, True)]),
        (18, 0, 0, [(0, 2, 4, False, False), (2, 2, 4, False, False), (4, 1, 2, False, True)]),
        (18, 0, 3, [(3, 1, 4, False, False), (4, 1, 2, False, True)]),
        (18, 13, 0, [(0, 3, 4, True, False), (3, 2, 2, False, True)]),
        (18, 13, 2, [(2, 1, 4, True, False), (3, 2, 2, False, True)]),
        (8, 8, 0, [(0, 1, 4, True, False), (1, 1, 4, False, True)]),
        (8, 8, 1, [(1, 1, 4, False, True)]),
        (8, 8, 2, []),
        (8, 0, 2, []),
    ],
)
def test_ranges_cover_what_the_other_side_lacks(
    make_world: MakeWorld, length: int, warm: int, start: int, expected: list[tuple[int, int, int, bool, bool]]
) -> None:
    world = make_world(budget=8)
    if warm:
        world.add("warm", prompt(warm), max_tokens=1)
        world.run()
    exporting = world.add("r", prompt(length), export_from_block=start)
    world.run()
    assert ranges_of(world) == expected
    assert len(world.answers["r"]) == 1
    assert world.pool.counts().leased == len(exporting.blocks)
    world.release("r")
    assert world.at_rest()


def test_blocks_that_are_being_read_are_never_taken_for_another(make_world: MakeWorld) -> None:
    world = make_world(blocks=9, budget=8)
    world.fill(world.reserve("decode", prompt(8), max_tokens=8))
    exporting = world.add("r", prompt(20, 100), export_from_block=0)
    world.step()
    assert exporting.is_pinned
    first = world.ranges["r"][0].block_ids
    world.run()
    assert tuple(exporting.blocks[: len(first)]) == first
    assert ranges_of(world)[-1][-1]
    assert len(world.answers["decode"]) == 7


def test_tokens_that_wait_are_those_that_will_be_computed(make_world: MakeWorld) -> None:
    world = make_world(budget=8, max_running=1)
    world.add("first", prompt(12), max_tokens=1)
    assert world.scheduler.waiting_tokens == 12
    world.step()
    assert world.scheduler.waiting_tokens == 3, "of one that is being computed, the last token is its answer's step"
    world.step()
    world.add("again", prompt(12), max_tokens=2)
    world.add("longer", prompt(20), max_tokens=2)
    assert world.scheduler.waiting_tokens == (12 - 8) + (20 - 12), "cached blocks are not computed again"


def test_reservations_are_counted_until_they_join(make_world: MakeWorld) -> None:
    world = make_world()
    world.scheduler.reserve(world.sequence("handed", prompt(8), max_tokens=3))
    assert (world.scheduler.reserved, world.scheduler.waiting, world.scheduler.running) == (1, 0, 0)
    world.scheduler.join("handed", 7)
    assert (world.scheduler.reserved, world.scheduler.waiting, world.scheduler.running) == (0, 0, 1)


@pytest.mark.parametrize("blocks", [64, 12])
def test_branches_give_tokens_where_the_chain_is_wrong(make_world: MakeWorld, blocks: int) -> None:
    """Also beside requests that take their blocks."""
    world = make_world(blocks=blocks, budget=40, proposes=True, branches=True)
    texts = {str(number): prompt(5, number * 100) for number in range(3)}
    for name, text in texts.items():
        world.add(name, text, max_tokens=30)
    world.run()
    assert not world.failed
    assert world.at_rest()
    for name, text in texts.items():
        while len(text) < 35:
            text.append(next_token(text))
        assert world.answers[name] == text[5:]
    assert world.from_branches > (10 if blocks == 64 else 0)


def test_a_prompt_that_fails_keeps_its_blocks_until_agents_have_read_them(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(blocks=8, budget=8)
    world.add("sent", prompt(16), export_from_block=0)
    world.step()

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(scheduler, "computed_range", fail)
    plan = world.scheduler.schedule()
    assert [name for name, _ in plan.failed] == ["sent"]
    assert world.pool.counts().leased > 0
    world.scheduler.release_export("sent")
    assert world.at_rest()
