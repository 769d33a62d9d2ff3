"""A step that runs out of memory fails one request, and the others' tokens are as ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank
from tandem.engine.output import Launched
from tandem.engine.runner import ModelRunner
from tandem.engine.step import StepInput
from tandem.errors import UnavailableError, WorkerLost
from tandem.kvcache.block_pool import BlockPool
from tandem.request import FinishReason, SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.scheduler.scheduler import Scheduler
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tests.conftest import Reference

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class ShortOfMemory:
    """A runner that computes a step and then cannot allocate, as long as `is_too_much` of it."""

    def __init__(self, runner: ModelRunner, is_too_much: Callable[[StepInput], bool]) -> None:
        self._runner = runner
        self._is_too_much = is_too_much

    @property
    def samples_on_device(self) -> bool:
        return self._runner.samples_on_device

    def can_be_ahead_of(self, step: StepInput) -> bool:
        return self._runner.can_be_ahead_of(step)

    def launch(self, step: StepInput) -> Launched | None:
        launched = self._runner.launch(step)
        if self._is_too_much(step):
            torch.empty(1 << 60)
        return launched


def engine_of(rank: Rank, is_too_much: Callable[[StepInput], bool], *, followers: bool = False) -> TandemEngine:
    scheduler = Scheduler(
        BlockPool(rank.layout.num_blocks), block_tokens=16, max_running_requests=8, max_step_tokens=128,
        max_model_tokens=rank.max_model_tokens,
    )  # fmt: skip
    runner = ShortOfMemory(rank.runner, is_too_much)
    return TandemEngine(runner, scheduler, VOCAB, (lambda step: None) if followers else None)  # type: ignore[arg-type]


def most_tokens(most: int) -> Callable[[StepInput], bool]:
    return lambda step: sum(len(each.token_ids) for each in step.sequences) > most


def test_the_largest_chunk_fails_and_the_others_go_on_token_by_token(
    make: Callable[..., Rank], reference: Reference
) -> None:
    driver = EngineDriver(engine_of(make(), most_tokens(60)))
    prompts = {"small": random_prompt(20, VOCAB, 1), "large": random_prompt(90, VOCAB, 2), "late": [5] * 30}
    driver.add("small", prompts["small"], GREEDY)
    driver.take(driver.engine.step())
    driver.add("large", prompts["large"], GREEDY)
    driver.add("late", prompts["late"], GREEDY)
    driver.run()
    error = driver.ends.pop("large")
    assert isinstance(error, UnavailableError)
    assert error.wire.retryable
    assert "90 tokens of a request ran out of memory" in str(error)
    assert driver.ends == {"small": FinishReason.LENGTH, "late": FinishReason.LENGTH}
    for name in ("small", "late"):
        assert driver.tokens[name] == reference.answer(prompts[name], GREEDY)
    assert driver.at_rest()


def test_decodes_fail_one_by_one_until_the_rest_fits(make: Callable[..., Rank], reference: Reference) -> None:
    driver = EngineDriver(engine_of(make(), lambda step: len(step.sequences) > 2))
    for number in range(4):
        driver.add(str(number), random_prompt(20, VOCAB, number), GREEDY)
    driver.run()
    assert [name for name, end in sorted(driver.ends.items()) if isinstance(end, UnavailableError)] == ["2", "3"]
    for number in range(2):
        assert driver.tokens[str(number)] == reference.answer(random_prompt(20, VOCAB, number), GREEDY)
    assert driver.at_rest()


def test_memory_that_is_short_for_all_leaves_an_idle_engine(make: Callable[..., Rank]) -> None:
    driver = EngineDriver(engine_of(make(), lambda step: True))
    driver.add("a", random_prompt(20, VOCAB), GREEDY)
    driver.run()
    assert isinstance(driver.ends["a"], UnavailableError)
    assert driver.at_rest()


def test_an_export_that_has_begun_is_not_begun_again(model_dir: Path, tmp_path: Path) -> None:
    class Exports:
        def __init__(self) -> None:
            self.begun: list[str] = []

        def begin_step(self, ranges: Sequence[ExportRange]) -> None:
            self.begun += [each.request_id for each in ranges]

        def layer_done(self, layer: int) -> None:
            """Reports nothing."""

    exports = Exports()
    driver = EngineDriver(engine_of(single_rank(model_dir, tmp_path / "r", exports), most_tokens(40)))
    driver.add("exported", random_prompt(20, VOCAB, 1), GREEDY, export_from_block=0)
    driver.add("large", random_prompt(50, VOCAB, 2), GREEDY)
    driver.add("other", random_prompt(20, VOCAB, 3), GREEDY)
    driver.run()
    assert exports.begun == ["exported"]
    assert isinstance(driver.ends["exported"], UnavailableError)
    assert isinstance(driver.ends["large"], UnavailableError)
    assert driver.ends["other"] is FinishReason.LENGTH
    assert driver.engine.load().blocks.leased == 2  # agents may be reading them
    assert driver.engine.cancel("exported")
    assert driver.at_rest()


def test_several_ranks_end_together(make: Callable[..., Rank]) -> None:
    engine = engine_of(make(), most_tokens(10), followers=True)
    driver = EngineDriver(engine)
    driver.add("a", random_prompt(20, VOCAB), GREEDY)
    with pytest.raises(WorkerLost, match=r"a step ran out of memory: .*DefaultCPUAllocator"):
        engine.step()


def test_other_errors_of_a_step_are_raised(make: Callable[..., Rank]) -> None:
    def broken(step: StepInput) -> bool:
        raise RuntimeError("no kernel image is available")

    driver = EngineDriver(engine_of(make(), broken))
    for number in range(2):
        driver.add(str(number), random_prompt(20, VOCAB, number), GREEDY)
    with pytest.raises(RuntimeError, match="no kernel image"):
        driver.engine.step()
