"""Blocks that every layer's window has left behind are given back while the request runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tests.conftest import Reference, write_family

VOCAB, WINDOW, BLOCK = 320, 24, 16
LONG = SamplingParams(temperature=0.0, max_tokens=150)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("mistral"), "mistral")


def test_a_long_answer_holds_no_more_than_its_window(
    mistral: Path, tmp_path: Path, reference_for: Callable[[Path], Reference]
) -> None:
    engine = single_rank(mistral, tmp_path / "r", kv_blocks=32).engine
    driver, prompt = EngineDriver(engine), random_prompt(100, VOCAB)
    driver.add("r", prompt, LONG)
    most = 0
    driver.take(engine.step())
    while engine.has_work:
        most = max(most, engine.load().blocks.in_use)
        driver.take(engine.step())
    assert most <= WINDOW // BLOCK + 2
    assert driver.tokens["r"] == reference_for(mistral).answer(prompt, LONG)
    assert driver.at_rest()


def test_requests_that_outgrow_the_pool_together_fit_by_their_windows(mistral: Path, tmp_path: Path) -> None:
    """Six of 250 tokens are 96 blocks."""
    small = single_rank(mistral, tmp_path / "r", kv_blocks=32, max_step_tokens=64, batch_invariant=True)
    large = single_rank(mistral, tmp_path / "l", kv_blocks=128, batch_invariant=True)
    together, one_by_one = EngineDriver(small.engine), EngineDriver(large.engine)
    for seed in range(6):
        together.add(str(seed), random_prompt(100, VOCAB, seed), LONG)
        one_by_one.add(str(seed), random_prompt(100, VOCAB, seed), LONG)
        one_by_one.run()
    together.run()
    assert small.engine.preemptions == 0
    assert together.tokens == one_by_one.tokens
    assert together.at_rest()


def test_a_preempted_or_cancelled_request_gives_back_only_what_it_still_has(mistral: Path, tmp_path: Path) -> None:
    engine = single_rank(mistral, tmp_path / "r", kv_blocks=12, max_step_tokens=64).engine
    driver = EngineDriver(engine)
    for seed in range(6):
        driver.add(str(seed), random_prompt(60, VOCAB, seed), LONG)
    for step in range(60):
        driver.take(engine.step())
        assert engine.load().blocks.conserved
        if step == 40:
            assert engine.cancel("0")
    driver.run()
    assert driver.at_rest()


def test_a_request_that_gave_blocks_back_is_not_held_for_others(mistral: Path, tmp_path: Path) -> None:
    driver = EngineDriver(single_rank(mistral, tmp_path / "r", kv_blocks=32).engine)
    driver.add("short", random_prompt(10, VOCAB), LONG)
    driver.add("long", random_prompt(100, VOCAB), LONG)
    driver.take(driver.engine.step())
    assert driver.engine.hold("short")
    assert not driver.engine.hold("long")
    driver.engine.resume("short")
    driver.run()
    assert driver.at_rest()
