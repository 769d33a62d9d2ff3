"""When static and dynamic batches begin, which requests are in them, and that no other joins."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec
from tandem.scheduler.batching import BatchRule
from tandem.scheduler.plan import StepPlan
from tandem.scheduler.sequence import SequenceStage

MakeWorld = Any  # the `World` class of conftest.py
STATIC, DYNAMIC = BatchRule(4, 1.0, from_first=False), BatchRule(4, 1.0, from_first=True)


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def names(plan: StepPlan) -> set[str]:
    return {chunk.sequence.request_id for chunk in plan.chunks}


@pytest.mark.parametrize(
    ("rule", "arrivals_s", "is_full", "begins_s"),
    [
        (STATIC, [5.0], False, 6.0),
        (STATIC, [5.0, 5.9, 6.8], False, 7.8),
        (DYNAMIC, [5.0, 5.9, 6.8], False, 6.0),
        (STATIC, [5.0, 5.1, 5.2, 5.3], False, 5.3),
        (DYNAMIC, [5.0, 5.1, 5.2, 5.3], False, 5.3),
        (STATIC, [5.0, 5.1], True, 5.1),
        (DYNAMIC, [5.0, 5.1], True, 5.1),
        # Requests in between were cancelled: the first one waits for no more than four windows.
        (STATIC, [5.0, 8.9], False, 9.0),
        (BatchRule(4, 0.0, from_first=False), [5.0], False, 5.0),
        (BatchRule(4, 0.0, from_first=True), [5.0], False, 5.0),
    ],
)
def test_a_batch_begins_when_it_is_full_or_its_window_is_over(
    rule: BatchRule, arrivals_s: list[float], is_full: bool, begins_s: float
) -> None:
    assert rule.begins_s(arrivals_s, is_full=is_full) == pytest.approx(begins_s)


def test_the_rule_is_that_of_the_spec() -> None:
    assert BatchRule.of(EngineSpec()) is None
    static = EngineSpec(batching="static", max_running_requests=7)
    assert BatchRule.of(static) == BatchRule(7, 0.1, from_first=False)
    assert BatchRule.of(EngineSpec(batching="dynamic", batching_window_s=0.0)) == BatchRule(64, 0.0, from_first=True)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"batching": "weekly"}, "'continuous', 'static' or 'dynamic'"),
        ({"batching": "static", "batching_window_s": -0.1}, "greater than or equal to 0"),
        ({"batching": "static", "batching_window_s": 60}, "less than or equal to 2"),
        ({"batching": "static", "batching_window_s": float("nan")}, "batching_window_s"),
        ({"batching_window_s": 0.1}, "batching_window_s: expected none with batching continuous"),
    ],
)
def test_an_engine_that_batches_otherwise_is_refused_by_its_field(engine: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match="batching") as refused:
        EngineSpec.model_validate(engine)
    assert said in str(refused.value)


def test_a_batch_is_one_engines_so_prefill_workers_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"decode\.engine\.batching: expected continuous with prefill workers"):
        ModelSpec.model_validate({"decode": {"engine": {"batching": "static"}}})
    aggregated = ModelSpec.model_validate({"prefill": {"workers": 0}, "engine": {"batching": "static"}})
    assert aggregated.no_prefill_workers is not None
    assert ModelSpec().no_prefill_workers is None


@pytest.mark.parametrize("rule", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_no_request_joins_a_batch_and_places_of_finished_requests_stay_empty(
    make_world: MakeWorld, rule: BatchRule
) -> None:
    world = make_world(blocks=40, batches=rule)
    for index in range(4):
        world.add(f"first {index}", prompt(4, 10 * index), max_tokens=3 + 3 * index)
    sizes: list[int] = []
    while world.scheduler.running or not sizes:
        sizes.append(len(world.step().chunks))
        if len(sizes) == 2:
            for index in range(2):
                world.add(f"second {index}", prompt(4, 50 + 10 * index), max_tokens=2)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert world.scheduler.waiting == 2
    world.run()
    assert len(world.answers) == 6
    assert world.at_rest()


@pytest.mark.parametrize(("rule", "begins_s"), [(STATIC, 1.9), (DYNAMIC, 1.0)], ids=["static", "dynamic"])
def test_a_static_batch_waits_for_silence_and_a_dynamic_one_for_its_first_request(
    make_world: MakeWorld, rule: BatchRule, begins_s: float
) -> None:
    world = make_world(blocks=40, batches=rule)
    for now_s in (0.0, 0.4, 0.9):
        world.now_s = now_s
        world.add(str(now_s), prompt(4, int(100 * now_s)))
        assert world.collect() is not None
        assert not world.scheduler.has_work
    world.wait()
    assert world.now_s == pytest.approx(begins_s)
    assert names(world.step()) == {"0.0", "0.4", "0.9"}


def test_what_comes_while_a_batch_runs_has_waited_when_it_ends(make_world: MakeWorld) -> None:
    world = make_world(blocks=40, batches=BatchRule(4, 0.02, from_first=True))
    world.add("long", prompt(4), max_tokens=9)
    world.wait()
    world.step()
    world.add("next", prompt(4, 50), max_tokens=2)
    while names(world.step()) == {"long"}:
        pass
    assert len(world.answers["long"]) == 9
    assert world.batch == {"next"}


def test_a_batch_is_no_larger_than_the_pool_and_what_fills_it_does_not_wait(make_world: MakeWorld) -> None:
    world = make_world(blocks=8, batches=BatchRule(4, 60.0, from_first=False))
    for index in range(3):
        world.add(str(index), prompt(14, 20 * index), max_tokens=2)
        assert world.scheduler.has_work is False
    assert names(world.step()) == {"0", "1"}
    assert world.now_s < 1
    world.run()
    assert world.now_s > 60, "the last one waits alone"
    assert len(world.answers) == 3
    assert world.at_rest()


def test_a_preempted_request_returns_to_its_batch(make_world: MakeWorld) -> None:
    world = make_world(blocks=5, batches=BatchRule(2, 1.0, from_first=False))
    world.add("old", prompt(8), max_tokens=9)
    world.add("young", prompt(7, 50), max_tokens=9)
    world.step()
    world.add("next", prompt(4, 90), max_tokens=2)
    world.run()
    assert world.scheduler.preemptions > 0
    assert {name: len(answer) for name, answer in world.answers.items()} == {"old": 9, "young": 9, "next": 2}
    assert world.at_rest()


def test_cancelling_a_whole_batch_lets_the_next_begin(make_world: MakeWorld) -> None:
    world = make_world(blocks=40, batches=BatchRule(2, 1.0, from_first=False))
    for index in range(4):
        world.add(str(index), prompt(4, 10 * index), max_tokens=5)
    world.step()
    assert world.batch == {"0", "1"}
    assert world.cancel("0")
    assert world.cancel("1")
    assert names(world.step()) == {"2", "3"}
    assert world.cancel("2")
    assert world.cancel("3")
    assert world.at_rest()


def test_a_collected_request_can_be_cancelled(make_world: MakeWorld) -> None:
    world = make_world(blocks=40, batches=STATIC)
    sequence = world.add("r", prompt(4))
    assert sequence.stage is SequenceStage.COLLECTED
    assert world.scheduler.waiting_tokens == 4
    assert world.cancel("r")
    assert world.collect() is None
    assert world.scheduler.waiting == 0


def test_a_request_that_was_moved_here_goes_on_at_once_and_the_next_batch_waits_for_it(make_world: MakeWorld) -> None:
    world = make_world(blocks=40, batches=STATIC)
    moved = world.reserve("moved", prompt(4), max_tokens=4)
    world.add("r", prompt(4, 20), max_tokens=2)
    world.fill(moved)
    world.now_s = 9.0
    assert names(world.step()) == {"moved"}
    assert world.scheduler.hold("moved")
    assert world.collect() is None, "it may come back"
    assert not world.scheduler.has_work
    world.cancel("moved")
    assert names(world.step()) == {"r"}
    world.run()
    assert world.at_rest()
