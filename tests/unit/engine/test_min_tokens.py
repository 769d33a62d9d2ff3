"""`min_tokens`: no stop token is chosen before the answer is long enough, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.errors import InputError
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama

VOCAB = 300
LONG = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=LONG)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=LONG, frequency_penalty=0.2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, seed=1)


class Model:
    def __init__(self, model_dir: Path, rendezvous: Path) -> None:
        self.engine = single_rank(model_dir, rendezvous).engine
        self.count = 0

    def answer(self, sampling: SamplingParams, given: Sequence[int] = ()) -> tuple[list[int], object]:
        """`given`: tokens that another worker has chosen."""
        self.count += 1
        driver, name = EngineDriver(self.engine), f"r{self.count}"
        rest = replace(sampling, max_tokens=sampling.max_tokens - len(given))
        driver.add(name, [*random_prompt(20, VOCAB), *given], rest, answered_tokens=len(given))
        driver.run()
        return driver.tokens.get(name, []), driver.ends[name]


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> Model:
    return Model(model_dir, tmp_path / "rendezvous")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_answer_ends_at_the_first_stop_token_after_it(model: Model, sampling: SamplingParams) -> None:
    free, _ = model.answer(sampling)
    stops = replace(sampling, stop_token_ids=frozenset(free[:3]))
    assert model.answer(stops) == (free[:1], FinishReason.STOP)
    for least in (1, 5, 12):
        tokens, reason = model.answer(replace(stops, min_tokens=least))
        assert not set(tokens[:least]) & stops.stop_token_ids
        assert len(tokens) == LONG or (len(tokens) > least and tokens[-1] in stops.stop_token_ids)
        assert (reason is FinishReason.STOP) == (tokens[-1] in stops.stop_token_ids)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_without_a_stop_token_at_hand_nothing_changes(model: Model, sampling: SamplingParams) -> None:
    free, _ = model.answer(sampling)
    unused = frozenset(range(VOCAB)) - set(free)
    assert model.answer(replace(sampling, min_tokens=LONG, stop_token_ids=frozenset(sorted(unused)[:1])))[0] == free


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_another_worker_counts_what_the_first_has_given(model: Model, sampling: SamplingParams) -> None:
    free, _ = model.answer(sampling)
    stops = replace(sampling, stop_token_ids=frozenset(free[:3]), min_tokens=12)
    whole, reason = model.answer(stops)
    for cut in (1, 6, 12):
        assert model.answer(stops, whole[:cut]) == (whole[cut:], reason)


def test_a_constraint_beside_it_is_refused() -> None:
    with pytest.raises(InputError, match="min_tokens"):
        SamplingParams.parse(seed=0, max_tokens=5, min_tokens=1, grammar="{}")
