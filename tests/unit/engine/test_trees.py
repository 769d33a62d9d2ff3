"""Trees of drafted tokens: a branch that is right becomes the answer, and its blocks the request's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.factory import Rank
from tandem.engine.step import Drafted, SequenceStep
from tandem.speculation.proposers import Verified
from tandem.testing.engine import EagerRecorder, EngineDriver, Exported, answer_that_moves, make_request, single_rank
from tests.unit.engine.test_drafts import GREEDY, KINDS, OPTIONS, VOCAB, prompt, run, write_medusa

HEADS, BRANCHES = 5, 6
SMALL = {"with a small budget": {"max_step_tokens": 64}}


class Told:
    """Drafts what it knows the answers to be, with a wrong token at a drawn place and the right one beside it."""

    def __init__(self, rank: Rank, texts: Sequence[Sequence[int]], seed: int = 0) -> None:
        self._texts = texts
        self._draw = random.Random(seed)
        self._scheduler = EngineDriver(rank.engine).engine._scheduler
        self.of_branches = 0
        assert rank.runner.drafter is not None
        rank.runner.drafter.draft = self.draft  # type: ignore[method-assign]
        assert self._scheduler.speculator is not None
        learn = self._scheduler.speculator.learn

        def learned(state: Any, verified: Verified) -> None:
            self.of_branches += verified.of_branch
            learn(state, verified)

        self._scheduler.speculator.learn = learned  # type: ignore[method-assign]

    def draft(self, sequences: Sequence[SequenceStep]) -> list[Drafted]:
        running = {tuple(each.blocks): each for each in self._scheduler._running}
        return [self._drafted(each, running[tuple(each.blocks)]) for each in sequences]

    def _drafted(self, step: SequenceStep, sequence: Any) -> Drafted:
        if not step.draft or not step.draft.count:
            return Drafted()
        length, count = len(sequence.tokens), step.draft.count
        text = next(each for each in self._texts if [*each[:length]] == sequence.tokens)
        right = [*text[length : length + count], *[7] * count][:count]
        tokens, beside = [*right], [[(token + 1 + n) % VOCAB for n in range(step.draft.beside)] for token in right]
        wrong = self._draw.randrange(count)
        tokens[wrong] = (tokens[wrong] - 1) % VOCAB
        beside[wrong][self._draw.randrange(2)] = right[wrong]
        return Drafted(tuple(tokens), tuple(map(tuple, beside)))


@pytest.fixture
def trees(tmp_path: Path) -> dict[str, Any]:
    heads = write_medusa(tmp_path / "heads", shared=False, heads=HEADS)
    return {
        "speculation": "medusa",
        "speculation_model": str(heads),
        "speculation_branches": BRANCHES,
        "speculation_adaptive": False,
    }


def texts_of(answers: dict[str, list[int]]) -> list[list[int]]:
    return [[*prompt(int(name.split()[1]), int(name.split()[1])), *tokens] for name, tokens in answers.items()]


@pytest.mark.parametrize("options", [pytest.param(each, id=name) for name, each in (OPTIONS | SMALL).items()])
def test_answers_are_the_same_where_branches_are_right(
    make: Callable[..., Rank], trees: dict[str, Any], options: dict[str, Any]
) -> None:
    kept = {key: value for key, value in options.items() if key == "kv_dtype"}
    expected = run(EngineDriver(make(batch_invariant=True, **kept).engine))
    rank = make(batch_invariant=True, **trees, **options)
    told = Told(rank, texts_of(expected))
    assert run(EngineDriver(rank.engine)) == expected
    assert told.of_branches > (50 if options.keys() <= {"kv_dtype"} else 3)


def test_a_device_chooses_the_tokens_of_branches(model_dir: Path, tmp_path: Path, trees: dict[str, Any]) -> None:
    paged = PagedPath(plain_attention, EagerRecorder())
    expected = run(EngineDriver(single_rank(model_dir, tmp_path / "a", paged=paged).engine))
    rank = single_rank(model_dir, tmp_path / "b", None, paged, **trees)
    told = Told(rank, texts_of(expected))
    assert run(EngineDriver(rank.engine)) == expected
    assert told.of_branches > 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 2, 5, 11])
def test_an_answer_moves_with_the_blocks_that_its_branches_left(
    make: Callable[..., Rank], trees: dict[str, Any], kind: str, after: int
) -> None:
    alone = EngineDriver(make(batch_invariant=True).engine)
    alone.add("r 20", prompt(20, 20), KINDS[kind])
    alone.run()
    exported = Exported()
    source, target = (make(batch_invariant=True, exporter=exported, **trees) for _ in range(2))
    told = [Told(rank, texts_of(alone.tokens)) for rank in (source, target)]
    drivers = EngineDriver(source.engine), EngineDriver(target.engine)
    request = make_request("r", prompt(20, 20), KINDS[kind])
    assert answer_that_moves(source, exported, drivers, target, request, after) == alone.tokens["r 20"]
    assert all(driver.at_rest() for driver in drivers)
    assert sum(each.of_branches for each in told) > 3


@pytest.mark.parametrize("cancelled_after", range(1, 7))
def test_a_step_that_fails_or_is_cancelled_leaves_no_block(
    make: Callable[..., Rank], trees: dict[str, Any], cancelled_after: int
) -> None:
    rank = make(**trees)
    driver = EngineDriver(rank.engine)
    driver.add("cancelled", prompt(30), GREEDY)
    driver.add("fails", prompt(33, 1), GREEDY)
    for _ in range(cancelled_after):
        driver.take(driver.engine.step())
    driver.engine.cancel("cancelled")
    launch, failed = rank.runner.launch, list[Any]()

    def fails(step: Any, drafted: Any = None) -> Any:
        if drafted is not None and not failed:
            failed.append(step)
            raise ValueError("no")
        return launch(step) if drafted is None else launch(step, drafted)

    rank.runner.launch = fails  # type: ignore[method-assign]
    driver.run()
    assert failed
    assert len(driver.tokens["fails"]) == GREEDY.max_tokens
    assert driver.at_rest()
