"""A prompt's logprobs are the reference's however the prompt is cut, and every position is told once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tandem.engine.factory import Rank
from tandem.engine.prompt_logprobs import ROWS
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EngineDriver, make_request
from tandem.testing.models import random_prompt
from tests.conftest import Reference

VOCAB = 300
SCORED = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
LENGTHS = (1, 2, 16, 17, ROWS, ROWS + 1, 150)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


def check(driver: EngineDriver, name: str, tokens: list[int], reference: Reference) -> None:
    found = driver.scores.get(name, [])
    assert [token.token_id for token in found] == tokens[1:]
    if len(tokens) > 1:
        expected = reference.logprobs(tokens)
        own = expected.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        assert [token.logprob for token in found] == pytest.approx(own.tolist(), abs=1e-4)
        for token, row in zip(found, expected.topk(2).values.tolist(), strict=True):
            assert [each.logprob for each in token.top] == pytest.approx(row, abs=1e-4)


@pytest.mark.parametrize("max_step_tokens", [16, 90, 512])
def test_logprobs_are_the_references_in_any_batch(
    make: Callable[..., Rank], reference: Reference, max_step_tokens: int
) -> None:
    driver = EngineDriver(make(max_step_tokens=max_step_tokens).engine)
    for length in LENGTHS:
        driver.add(str(length), prompt(length), SCORED)
    driver.add("unscored", prompt(40), replace(SCORED, prompt_logprobs=None))
    driver.run()
    for length in LENGTHS:
        check(driver, str(length), prompt(length), reference)
        assert driver.tokens[str(length)] == reference.answer(prompt(length), SCORED)
    assert "unscored" not in driver.scores
    assert driver.at_rest()


def test_a_cached_prefix_is_computed_again_and_stays_usable(make: Callable[..., Rank], reference: Reference) -> None:
    driver = EngineDriver(make().engine)
    for name, sampling in (("cold", replace(SCORED, prompt_logprobs=None)), ("scored", SCORED)):
        driver.add(name, prompt(100), sampling)
        driver.run()
    driver.add("warm", prompt(100), replace(SCORED, prompt_logprobs=None))
    driver.run()
    check(driver, "scored", prompt(100), reference)
    assert driver.cached == {"cold": 0, "scored": 0, "warm": 96}
    assert driver.tokens["cold"] == driver.tokens["scored"] == driver.tokens["warm"]
    assert driver.at_rest()


def test_a_preempted_prompt_tells_every_position_once(make: Callable[..., Rank], reference: Reference) -> None:
    driver = EngineDriver(make(kv_blocks=12, max_step_tokens=24).engine)
    prompts = {str(seed): prompt(60, seed) for seed in range(5)}
    for name, tokens in prompts.items():
        driver.add(name, tokens, replace(SCORED, max_tokens=30))
    driver.run()
    for name, tokens in prompts.items():
        check(driver, name, tokens, reference)
        assert driver.ends[name] is FinishReason.LENGTH
    assert driver.at_rest()


def test_an_imported_prompt_is_scored_by_who_computed_it(make: Callable[..., Rank]) -> None:
    driver = EngineDriver(make().engine)
    driver.engine.reserve(make_request("r", prompt(40), SCORED))
    driver.engine.join("r", 5)
    driver.run()
    assert driver.scores == {}
    assert driver.at_rest()
