"""Prompts beside answers get as many tokens of a step as its longest time allows, and never fewer than a few."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.scheduler.plan import StepPlan
from tandem.scheduler.prompt_limit import LEAST_TOKENS, PromptLimit

MakeWorld = Any  # the `World` class of conftest.py
LONGEST_S = 0.02


def after_steps(limit: PromptLimit, cost: Callable[[int], float], count: int = 100) -> list[float]:
    """The times of steps that use all of the limit."""
    found = []
    for _ in range(count):
        found.append(cost(limit.tokens))
        limit.learn(limit.tokens, found[-1])
    return found


@pytest.mark.parametrize(("base_s", "token_s"), [(0.0, 1e-4), (0.005, 3e-5), (0.015, 2e-5), (0.001, 1e-3)])
def test_it_finds_the_most_that_fits(base_s: float, token_s: float) -> None:
    limit = PromptLimit(LONGEST_S, 8192)
    times = after_steps(limit, lambda tokens: base_s + token_s * tokens)
    fitting = (LONGEST_S - base_s) / token_s
    assert 0.75 * fitting < limit.tokens <= fitting + 1
    assert sum(time > LONGEST_S * 1.001 for time in times) <= 6  # only while it is sought


def test_with_times_that_vary_most_steps_are_in_time() -> None:
    draw = random.Random(1)
    limit = PromptLimit(LONGEST_S, 8192)
    times = after_steps(limit, lambda tokens: (0.005 + 3e-5 * tokens) * draw.lognormvariate(0, 0.1), 2000)
    assert sum(time > 1.1 * LONGEST_S for time in times) < 0.08 * len(times)
    assert sum(times) / len(times) > 0.85 * LONGEST_S, "and it is not far too careful"


def test_slow_moments_of_a_machine_do_not_stop_prompts() -> None:
    draw = random.Random(2)
    limit = PromptLimit(LONGEST_S, 8192)
    times = after_steps(limit, lambda tokens: (0.005 + 3e-5 * tokens) * (5 if draw.random() < 0.02 else 1), 2000)
    usual = sorted(times)[len(times) // 2]
    assert usual > 0.7 * LONGEST_S


def test_slow_moments_in_steps_with_the_ends_of_prompts_do_not_stop_them_either() -> None:
    draw = random.Random(3)
    limit = PromptLimit(LONGEST_S, 8192)
    found = []
    for _ in range(2000):
        tokens = 1 if draw.random() < 0.5 else limit.tokens
        limit.learn(tokens, (0.005 + 1e-5 * tokens) * (10 if draw.random() < 0.01 else 1))
        found.append(limit.tokens)
    assert sorted(found)[1000] > 800  # of 1,500 that fit


def test_it_rises_fast_again_when_steps_became_short() -> None:
    limit = PromptLimit(LONGEST_S, 8192)
    limit.learn(32, 1.0)
    after_steps(limit, lambda tokens: 1e-6 * tokens, 25)
    assert limit.tokens == 8192


def test_steps_that_took_too_long_lower_it_by_half_at_most_and_time_raises_it_again() -> None:
    limit = PromptLimit(LONGEST_S, 4096)
    after_steps(limit, lambda tokens: 0.00001 * tokens)
    full = limit.tokens
    limit.learn(full, 1.25 * LONGEST_S)
    assert limit.tokens == pytest.approx(0.8 * full, abs=1)
    limit.learn(limit.tokens, 10 * LONGEST_S)
    assert limit.tokens == pytest.approx(0.4 * full, abs=1)
    after_steps(limit, lambda tokens: 0.00001 * tokens, 40)
    assert limit.tokens == pytest.approx(full, rel=0.1)


def test_steps_that_used_little_of_it_change_nothing_unless_they_were_too_slow() -> None:
    limit = PromptLimit(LONGEST_S, 4096)
    after_steps(limit, lambda tokens: 0.00001 * tokens)
    before = limit.tokens
    limit.learn(before // 2, LONGEST_S / 100)
    assert limit.tokens == before
    limit.learn(1, 1.5 * LONGEST_S)
    assert limit.tokens == before // 2


def test_it_stays_between_a_few_tokens_and_the_budget() -> None:
    limit = PromptLimit(LONGEST_S, 4096)
    after_steps(limit, lambda tokens: 1.0)
    assert limit.tokens == LEAST_TOKENS
    after_steps(limit, lambda tokens: 1e-9, 200)
    assert limit.tokens == 4096
    assert PromptLimit(LONGEST_S, 20).tokens == 20


def counts(plan: StepPlan) -> dict[str, int]:
    return {chunk.sequence.request_id: chunk.count for chunk in plan.chunks}


def test_only_beside_answers_are_prompts_cut_to_it(make_world: MakeWorld) -> None:
    world = make_world(blocks=128, budget=64)
    limit = world.scheduler.prompt_limit = PromptLimit(LONGEST_S, 64)
    for _ in range(3):
        limit.learn(limit.tokens, 10.0)
    assert limit.tokens == 16
    world.add("first", list(range(100)), max_tokens=30)
    assert counts(world.step()) == {"first": 64}, "no answer goes on yet"
    assert counts(world.step()) == {"first": 36}
    world.add("second", list(range(200, 240)), max_tokens=2)
    world.add("third", list(range(300, 320)), max_tokens=2)
    assert counts(world.step()) == {"first": 1, "second": 16}
    assert counts(world.step()) == {"first": 1, "second": 16}
    assert counts(world.step()) == {"first": 1, "second": 8, "third": 8}
    assert counts(world.step()) == {"first": 1, "second": 1, "third": 12}
    world.run()
    assert world.at_rest()


def test_what_is_learned_are_prompt_tokens_of_steps_with_answers(make_world: MakeWorld) -> None:
    world = make_world(blocks=128, budget=64)
    world.scheduler.prompt_limit = PromptLimit(LONGEST_S, 64)
    world.add("first", list(range(40)), max_tokens=30)
    assert world.step().beside_answers == 0
    world.add("second", list(range(200, 250)), max_tokens=2)
    assert [world.step().beside_answers for _ in range(3)] == [32, 18, 0]
    world.run()
    assert world.at_rest()


def test_proposals_take_no_more_of_a_step_than_prompts_may(make_world: MakeWorld) -> None:
    world = make_world(blocks=128, budget=64, proposes=True)
    world.scheduler.prompt_limit = PromptLimit(LONGEST_S, 64)
    world.add("first", list(range(7)), max_tokens=60)
    for _ in range(3):
        world.step()
    world.add("second", list(range(200, 290)), max_tokens=2)
    plans = [world.step() for _ in range(2)]
    assert [plan.beside_answers for plan in plans] == [32, 32]
    assert all(sum(chunk.computed_tokens for chunk in plan.chunks) == 33 for plan in plans)
    world.run()
    assert world.at_rest()


def test_answers_that_wait_for_their_masks_go_on_too(make_world: MakeWorld) -> None:
    class Awaited:
        def is_awaited(self, tokens: list[int]) -> bool:
            return True

    world = make_world(blocks=128, budget=64)
    world.scheduler.prompt_limit = PromptLimit(LONGEST_S, 64)
    answer = world.add("first", list(range(40)), max_tokens=30)
    world.step()
    answer.grammar = Awaited()
    world.add("second", list(range(200, 290)), max_tokens=2)
    world.step()
    plan = world.step()
    assert counts(plan) == {"second": 32}
    assert plan.beside_answers == 32
