"""Penalties and biases change the logits by their definitions, and only the choice sees it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tandem.request import SamplingParams
from tandem.sampling.penalties import penalised_logits
from tandem.sampling.sampler import choose
from tandem.token_history import TokenHistory

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 2.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16), max_size=4).map(
        lambda given: tuple(sorted(given.items()))
    ),
)


def by_definition(
    row: NDArray[np.float32], params: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    """Token by token: arXiv:1909.05858, then OpenAI's formula, then the bias."""
    counts = Counter(answer)
    logits = []
    for token, logit in enumerate(float(value) for value in row):
        if token in prompt or token in answer:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= counts[token] * params.frequency_penalty + (counts[token] > 0) * params.presence_penalty
        logits.append(logit + dict(params.logit_bias).get(token, 0.0))
    return logits


@settings(max_examples=300)
@given(params=PARAMS, prompt=TOKENS, answer=TOKENS, seed=st.integers(0, 99))
def test_logits_change_by_the_definitions(
    params: SamplingParams, prompt: list[int], answer: list[int], seed: int
) -> None:
    row = (4 * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)
    before = row.copy()
    found = penalised_logits(row, params, TokenHistory(prompt, answer))
    assert found == pytest.approx(by_definition(row, params, prompt, answer), abs=1e-4)
    assert (row == before).all()


def test_a_history_that_grew_is_that_of_its_tokens() -> None:
    grown = TokenHistory([1, 1, 2])
    for token in (3, 3, 2):
        grown.extend([token])
    whole = TokenHistory([1, 2], [3, 2, 3])
    assert dict(zip(*map(list, grown.answer()), strict=True)) == dict(zip(*map(list, whole.answer()), strict=True))
    assert set(grown.seen()) == set(whole.seen()) == {1, 2, 3}


def test_the_prompt_does_not_count_for_presence_and_frequency() -> None:
    row = np.array([2.0, 1.0], dtype=np.float32)
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert choose(row, params, 1, TokenHistory([0])).token_id == 0
    assert choose(row, params, 1, TokenHistory([], [0])).token_id == 1


def test_a_bias_bans_and_forces_also_greedily_and_without_history() -> None:
    row = np.array([9.0, 8.0, -30.0], dtype=np.float32)
    assert choose(row, SamplingParams(temperature=0.0, logit_bias=((0, -100.0),)), 0).token_id == 1
    assert {choose(row, SamplingParams(logit_bias=((2, 100.0),)), place).token_id for place in range(50)} == {2}


def test_logprobs_stay_those_of_the_model() -> None:
    row = np.array([1.0, 0.0, -1.0], dtype=np.float32)
    changed = choose(row, SamplingParams(temperature=0.0, logit_bias=((2, 100.0),), logprobs=1), 0)
    plain = choose(row, SamplingParams(temperature=0.0, logprobs=1), 0)
    assert changed.token_id == 2
    assert changed.logprob == pytest.approx(float(-1.0 - np.log(np.exp(row).sum())))
    assert changed.top == plain.top


def test_tokens_of_no_probability_stay_so() -> None:
    row = np.array([-np.inf, 0.0], dtype=np.float32)
    found = penalised_logits(row, SamplingParams(repetition_penalty=0.5, logit_bias=((0, 100.0),)), TokenHistory([0]))
    assert found[0] == -np.inf
