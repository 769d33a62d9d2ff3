"""A request that makes the step fail ends with an error, and the others' tokens are as ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.engine.engine import Engine
from tandem.engine.factory import Rank
from tandem.engine.output import Launched
from tandem.engine.runner import ModelRunner
from tandem.engine.step import StepInput
from tandem.errors import InternalError, WorkerLost
from tandem.kvcache.block_pool import BlockPool
from tandem.request import FinishReason, SamplingParams
from tandem.scheduler.scheduler import Scheduler
from tandem.testing.engine import EngineDriver
from tandem.testing.models import random_prompt
from tests.conftest import Reference

VOCAB = 300
POISON = 299
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Poisoned:
    """A runner that raises `error` for steps with POISON, or for those of more than `most` sequences."""

    def __init__(self, runner: ModelRunner, error: Exception, most: int = 99, *, on_gpu: bool = False) -> None:
        self._runner = runner
        self._error = error
        self._most = most
        self.samples_on_device = on_gpu

    def can_be_ahead_of(self, step: StepInput) -> bool:
        return False

    def launch(self, step: StepInput) -> Launched | None:
        launched = self._runner.launch(step)
        if len(step.sequences) > self._most or any(POISON in each.token_ids for each in step.sequences):
            raise self._error
        return launched


def engine_of(rank: Rank, runner: Poisoned, *, followers: bool = False) -> Engine:
    scheduler = Scheduler(
        BlockPool(rank.layout.num_blocks), block_tokens=16, max_running_requests=8, max_step_tokens=128,
        max_model_tokens=rank.max_model_tokens,
    )  # fmt: skip
    return Engine(runner, scheduler, VOCAB, (lambda step: None) if followers else None)  # type: ignore[arg-type]


def prompt_of(number: int) -> list[int]:
    return [token % POISON for token in random_prompt(20 + 10 * number, VOCAB, number)]


@pytest.mark.parametrize("error", [IndexError("out of range"), RuntimeError("shapes differ"), AssertionError()])
def test_the_one_that_fails_alone_ends_and_the_others_go_on_token_by_token(
    make: Callable[..., Rank], reference: Reference, error: Exception
) -> None:
    rank = make()
    driver = EngineDriver(engine_of(rank, Poisoned(rank.runner, error)))
    driver.add("first", prompt_of(1), GREEDY)
    driver.take(driver.engine.step())
    driver.add("poisoned", [5, POISON, 6], GREEDY)
    driver.add("late", prompt_of(2), GREEDY)
    driver.run()
    ended = driver.ends.pop("poisoned")
    assert isinstance(ended, InternalError)
    assert str(error) in str(ended)
    assert driver.ends == {"first": FinishReason.LENGTH, "late": FinishReason.LENGTH}
    for name, number in (("first", 1), ("late", 2)):
        assert driver.tokens[name] == reference.answer(prompt_of(number), GREEDY)
    assert driver.at_rest()


def test_a_failure_that_no_single_request_causes_ends_the_worker(make: Callable[..., Rank]) -> None:
    rank = make()
    driver = EngineDriver(engine_of(rank, Poisoned(rank.runner, IndexError("two is too many"), most=1)))
    for number in range(2):
        driver.add(str(number), prompt_of(number), GREEDY)
    with pytest.raises(IndexError, match="two is too many"):
        driver.run()


def test_three_requests_that_fail_one_after_another_end_the_worker(make: Callable[..., Rank]) -> None:
    """It is more likely at fault than they."""
    rank = make()
    driver = EngineDriver(engine_of(rank, Poisoned(rank.runner, IndexError("no kernel"))))
    for number in range(2):
        driver.add(str(number), [5, POISON, 6], GREEDY)
        driver.run()
    driver.add("well", prompt_of(1), GREEDY)
    driver.run()
    for number in range(2):
        driver.add(f"again {number}", [5, POISON, 6], GREEDY)
        driver.run()
    driver.add("third", [5, POISON, 6], GREEDY)
    with pytest.raises(IndexError, match="no kernel"):
        driver.run()


def test_so_does_one_on_a_gpu_or_with_several_ranks(make: Callable[..., Rank]) -> None:
    """A GPU's errors stay, and the ranks may differ in what they have computed."""
    rank = make()
    lost = Poisoned(rank.runner, RuntimeError("CUDA error: an illegal memory access"), on_gpu=True)
    for engine in (engine_of(rank, lost), engine_of(rank, Poisoned(rank.runner, IndexError()), followers=True)):
        driver = EngineDriver(engine)
        driver.add("poisoned", [5, POISON, 6], GREEDY)
        with pytest.raises((RuntimeError, IndexError)):
            driver.run()


def test_a_gpus_host_may_fail_for_one_request(make: Callable[..., Rank]) -> None:
    rank = make()
    driver = EngineDriver(engine_of(rank, Poisoned(rank.runner, KeyError("no such row"), on_gpu=True)))
    driver.add("poisoned", [5, POISON, 6], GREEDY)
    driver.run()
    assert isinstance(driver.ends["poisoned"], InternalError)
    assert not isinstance(driver.ends["poisoned"], WorkerLost)
    assert driver.at_rest()
