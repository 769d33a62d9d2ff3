"""A request that makes the step fail ends with an error, and the others' tokens are as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank
from tandem.engine.output import Launched
from tandem.engine.runner import ModelRunner
from tandem.engine.step import StepInput
from tandem.errors import InternalError, RequestFailed, WorkerLost
from tandem.kvcache.block_pool import BlockPool, Found
from tandem.request import FinishReason, SamplingParams
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence
from tandem.scheduler.sequence_blocks import SequenceBlocks
from tandem.testing.engine import EagerRecorder, EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tandem.token_history import TokenHistory
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


def engine_of(rank: Rank, runner: Poisoned, *, followers: bool = False) -> TandemEngine:
    scheduler = Scheduler(
        BlockPool(rank.layout.num_blocks), block_tokens=16, max_running_requests=8, max_step_tokens=128,
        max_model_tokens=rank.max_model_tokens,
    )  # fmt: skip

    def differ() -> None:
        raise WorkerLost("only this rank failed")

    told = (lambda step: None) if followers else None
    return TandemEngine(runner, scheduler, VOCAB, told, differ if followers else None)  # type: ignore[arg-type]


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
    assert isinstance(ended, RequestFailed)  # which is no reason to eject the worker
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


@pytest.mark.parametrize("at_once", [1, 2])
def test_bad_requests_alone_on_a_worker_do_not_end_it(
    make: Callable[..., Rank], reference: Reference, at_once: int
) -> None:
    """At once or in a row: a chunk that does not depend on them is computed, so the engine is well."""
    rank = make()
    driver = EngineDriver(engine_of(rank, Poisoned(rank.runner, IndexError("no row"))))
    for number in range(6):
        driver.add(str(number), [5, POISON, 6 + number], GREEDY)
        if number % at_once == at_once - 1:
            driver.run()
    assert [type(driver.ends[str(number)]) for number in range(6)] == [RequestFailed] * 6
    driver.add("well", prompt_of(1), GREEDY)
    driver.run()
    assert driver.tokens == {"well": reference.answer(prompt_of(1), GREEDY)}
    assert driver.at_rest()


def test_an_engine_that_computes_nothing_ends(make: Callable[..., Rank]) -> None:
    rank = make()
    driver = EngineDriver(engine_of(rank, Poisoned(rank.runner, IndexError("no kernel"), most=0)))
    driver.add("any", prompt_of(1), GREEDY)
    with pytest.raises(IndexError, match="no kernel"):
        driver.run()


def test_so_does_a_lost_gpu_or_one_rank_that_fails_alone(make: Callable[..., Rank]) -> None:
    """A GPU's errors stay, and ranks that differ wait for each other's collectives."""
    rank = make()
    lost = Poisoned(rank.runner, RuntimeError("CUDA error: an illegal memory access"), on_gpu=True)
    alone = engine_of(rank, Poisoned(rank.runner, IndexError()), followers=True)
    for engine, error in ((engine_of(rank, lost), RuntimeError), (alone, WorkerLost)):
        driver = EngineDriver(engine)
        driver.add("poisoned", [5, POISON, 6], GREEDY)
        with pytest.raises(error):
            driver.run()


class FailsFor(Scheduler):
    """Fails at `part` for requests with POISON, at the `call`th call."""

    def __init__(self, rank: Rank, part: str, call: int) -> None:
        super().__init__(
            BlockPool(rank.layout.num_blocks), block_tokens=16, max_running_requests=8, max_step_tokens=128,
            max_model_tokens=rank.max_model_tokens,
        )  # fmt: skip
        self._blocks = FailingBlocks(self.pool, self._count)
        self._calls_left = {part: call}

    def _count(self, part: str, sequence: Sequence) -> None:
        if POISON in sequence.tokens and part in self._calls_left:
            self._calls_left[part] -= 1
            if self._calls_left[part] <= 0:
                raise KeyError("no such block")

    def _find_room(self, sequence: Sequence, count: int) -> int:
        self._count("room", sequence)
        return super()._find_room(sequence, count)


class FailingBlocks(SequenceBlocks):
    def __init__(self, pool: BlockPool, count: Callable[[str, Sequence], None]) -> None:
        super().__init__(pool, block_tokens=16)
        self._count = count

    def match(self, sequence: Sequence) -> list[Found]:
        self._count("match", sequence)
        return super().match(sequence)

    def commit(self, sequence: Sequence) -> None:
        self._count("commit", sequence)
        super().commit(sequence)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("part", "call"), [("match", 2), ("room", 3), ("commit", 1), ("commit", 4)])
def test_an_error_of_the_scheduler_ends_the_request_that_it_came_up_for(
    model_dir: Path, tmp_path: Path, reference: Reference, part: str, call: int, ahead: bool
) -> None:
    paged = PagedPath(plain_attention, EagerRecorder()) if ahead else None
    rank = single_rank(model_dir, tmp_path / "rendezvous", paged=paged)
    driver = EngineDriver(TandemEngine(rank.runner, FailsFor(rank, part, call), VOCAB, None))
    driver.add("first", prompt_of(1), GREEDY)
    driver.add("poisoned", [5, POISON, 6], GREEDY)
    driver.run()
    assert isinstance(driver.ends["poisoned"], RequestFailed)
    assert driver.tokens["first"] == reference.answer(prompt_of(1), GREEDY)
    assert driver.at_rest()


class FailsAhead:
    """A runner whose launches ahead fail, as of decode graphs that cannot take a request."""

    samples_on_device = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.ahead = 0

    def can_be_ahead_of(self, step: StepInput) -> bool:
        return self._runner.can_be_ahead_of(step)

    def launch(self, step: StepInput) -> Launched | None:
        self.ahead += step.ahead
        if step.ahead and len(step.sequences) > 1:
            raise KeyError("no such graph")
        return self._runner.launch(step)


def test_a_step_that_cannot_be_launched_ahead_runs_in_its_turn(
    model_dir: Path, tmp_path: Path, reference: Reference
) -> None:
    rank = single_rank(model_dir, tmp_path / "rendezvous", paged=PagedPath(plain_attention, EagerRecorder()))
    runner = FailsAhead(rank.runner)
    driver = EngineDriver(engine_of(rank, runner))  # type: ignore[arg-type]
    for number in range(2):
        driver.add(str(number), prompt_of(number), GREEDY)
    driver.run()
    for number in range(2):
        assert driver.tokens[str(number)] == reference.answer(prompt_of(number), GREEDY)
    assert runner.ahead == 1  # not tried again with them
    assert driver.at_rest()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_whose_input_cannot_be_made_ends_alone(
    model_dir: Path, tmp_path: Path, reference: Reference, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here its history fails, which penalties read, from the fourth token of the answer on."""
    rank = single_rank(model_dir, tmp_path / "rendezvous", paged=PagedPath(plain_attention, EagerRecorder()))
    history = Sequence.history

    def failing(sequence: Sequence, length: int) -> TokenHistory:
        if POISON in sequence.tokens and sequence.generated >= 3 + ahead:
            raise KeyError("no such token")
        return history(sequence, length)

    monkeypatch.setattr(Sequence, "history", failing)
    driver = EngineDriver(rank.engine)
    driver.add("first", prompt_of(1), GREEDY)
    driver.add("poisoned", [5, POISON, 6], SamplingParams(temperature=0.7, presence_penalty=0.5, max_tokens=8))
    driver.run()
    assert isinstance(driver.ends["poisoned"], RequestFailed)
    assert driver.tokens["first"] == reference.answer(prompt_of(1), GREEDY)
    assert driver.at_rest()


def test_a_gpus_host_may_fail_for_one_request(make: Callable[..., Rank]) -> None:
    rank = make()
    driver = EngineDriver(engine_of(rank, Poisoned(rank.runner, KeyError("no such row"), on_gpu=True)))
    driver.add("poisoned", [5, POISON, 6], GREEDY)
    driver.run()
    assert isinstance(driver.ends["poisoned"], InternalError)
    assert not isinstance(driver.ends["poisoned"], WorkerLost)
    assert driver.at_rest()


def test_a_stop_token_that_the_vocabulary_lacks_never_comes_and_harms_nothing(make: Callable[..., Rank]) -> None:
    """A checkpoint may name one, and min_tokens forbids all of them: on a GPU the worker would end."""
    sampling = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=3, stop_token_ids=frozenset({2, 10**6}))
    driver = EngineDriver(make().engine)
    driver.add("r", random_prompt(20, VOCAB), sampling)
    driver.run()
    assert len(driver.tokens["r"]) >= 3
    assert driver.at_rest()
