"""A decoding request that is held, taken over by another engine, or goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.engine.factory import Rank
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, Exported, make_request
from tandem.testing.models import random_prompt
from tests.conftest import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12, frequency_penalty=0.5)
VOCAB = 300


def prompt(length: int) -> list[int]:
    return random_prompt(length, VOCAB)


def steps(driver: EngineDriver, name: str, tokens: int) -> None:
    while len(driver.tokens.get(name, [])) < tokens:
        driver.take(driver.engine.step())


def test_a_held_request_gets_no_token_and_goes_on_as_if_nothing_had_been(
    make: Callable[..., Rank], reference: Reference
) -> None:
    driver = EngineDriver(make().engine)
    driver.add("a", prompt(20), SEEDED)
    driver.add("b", prompt(33), GREEDY)
    steps(driver, "a", 4)
    assert driver.engine.hold("a")
    before = list(driver.tokens["a"])
    driver.run()
    assert driver.tokens["a"] == before
    assert driver.tokens["b"] == reference.answer(prompt(33), GREEDY)
    assert driver.engine.load().reserved_requests == 1
    driver.engine.resume("a")
    driver.run()
    assert driver.tokens["a"] == reference.answer(prompt(20), SEEDED)
    assert driver.at_rest()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("length", "given"), [(20, 1), (31, 1), (16, 5), (70, 11)])
def test_another_engine_takes_over_the_blocks_and_the_answer_goes_on_exactly(
    make: Callable[..., Rank], reference: Reference, length: int, given: int, sampling: SamplingParams
) -> None:
    from_, to = Exported(), make()
    source = make(exporter=from_)
    s, t = EngineDriver(source.engine), EngineDriver(to.engine)
    s.add("r", prompt(length), sampling)
    steps(s, "r", given)
    assert s.engine.hold("r")
    answer = s.tokens["r"]

    rest = replace(sampling, max_tokens=sampling.max_tokens - (given - 1))
    request = make_request("r", [*prompt(length), *answer[:-1]], rest, answered_tokens=given - 1)
    reservation = t.engine.reserve(request)
    assert s.engine.export_held("r", 0) == length + given - 1
    s.run()
    (told,) = from_.ranges
    assert told.is_last
    assert told.last_block_tokens == ((length + given - 1) % 16 or 16)
    for logical, block in enumerate(told.block_ids):
        to.pool.tensor[reservation.block_ids[logical]] = source.pool.tensor[block]
    assert s.engine.cancel("r")
    t.engine.join("r", answer[-1])
    t.run()

    assert [*answer, *t.tokens["r"]] == reference.answer(prompt(length), sampling)
    assert s.at_rest()
    assert t.at_rest()


def test_only_what_decodes_can_be_held(make: Callable[..., Rank]) -> None:
    driver = EngineDriver(make(max_step_tokens=16).engine)
    driver.add("r", prompt(40), GREEDY)
    assert not driver.engine.hold("r")  # it waits
    driver.take(driver.engine.step())
    assert not driver.engine.hold("r")  # its prompt is being computed
    assert not driver.engine.hold("nobody")
    driver.run()
    assert not driver.engine.hold("r")  # it is over


def test_blocks_that_were_to_be_announced_are_not_when_their_request_is_gone(make: Callable[..., Rank]) -> None:
    exported = Exported()
    driver = EngineDriver(make(exporter=exported).engine)
    driver.add("r", prompt(20), GREEDY)
    steps(driver, "r", 2)
    driver.engine.hold("r")
    driver.engine.export_held("r", 0)
    driver.engine.cancel("r")
    assert not driver.engine.has_work
    assert driver.at_rest()
    assert exported.ranges == []


def test_a_request_without_room_waits_for_the_blocks_of_one_that_moves(
    make: Callable[..., Rank], reference: Reference
) -> None:
    driver = EngineDriver(make(kv_blocks=8).engine)
    driver.add("moves", prompt(80), GREEDY)
    driver.add("grows", prompt(30), GREEDY)
    steps(driver, "moves", 2)
    assert driver.engine.hold("moves")
    for _ in range(20):
        if driver.engine.has_work:
            driver.take(driver.engine.step())
    assert not driver.engine.has_work, "it waits"
    assert len(driver.tokens["grows"]) < GREEDY.max_tokens
    driver.engine.cancel("moves")
    driver.run()
    assert driver.tokens["grows"] == reference.answer(prompt(30), GREEDY)


def test_a_held_request_finds_a_place_when_it_goes_on(make: Callable[..., Rank]) -> None:
    """Otherwise more requests would run than the worker was made for."""
    driver = EngineDriver(make(max_running_requests=2).engine)
    driver.add("a", prompt(20), GREEDY)
    driver.add("b", prompt(33), GREEDY)
    steps(driver, "b", 2)
    assert driver.engine.hold("a")
    driver.add("c", prompt(17), GREEDY)
    for _ in range(3):
        driver.take(driver.engine.step())
    assert "c" not in driver.tokens
    driver.engine.resume("a")
    most = 0
    while driver.engine.has_work:
        driver.take(driver.engine.step())
        most = max(most, driver.engine.load().running_requests)
    assert (most, len(driver.tokens["c"])) == (2, GREEDY.max_tokens)
