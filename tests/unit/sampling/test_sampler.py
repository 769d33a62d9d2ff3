"""The sampler draws from the distribution that truncation leaves, and from nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tandem.request import SamplingParams
from tandem.sampling.philox import gumbel, words_of
from tandem.sampling.sampler import choose

Row = NDArray[np.float32]

# Steps of 1/1024: logits that differ by less than the tolerance of `survivors` have no defined order.
ROWS = hnp.arrays(
    np.float32, st.integers(1, 200), elements=st.integers(-30 << 10, 30 << 10).map(lambda n: np.float32(n / 1024))
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.5, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 250)),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def survivors(row: Row, params: SamplingParams) -> NDArray[np.int64]:
    """The definition, by full sorts: temperature, top-k, top-p, min-p."""
    scaled = row.astype(np.float64) / params.temperature
    order = np.lexsort((np.arange(len(row)), -scaled))
    if params.top_k is not None:
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    if params.top_p < 1.0:
        reached = int(np.searchsorted(np.cumsum(weights), params.top_p * weights.sum()))
        order, weights = order[: reached + 1], weights[: reached + 1]
    kept: np.ndarray[Any, np.dtype[np.int64]] = order[weights >= params.min_p * weights[0] * (1 - 1e-12)]
    return kept


def by_definition(row: Row, params: SamplingParams, position: int) -> int:
    ids = np.sort(survivors(row, params))
    noise = gumbel(words_of(params.seed, position, ids))
    return int(ids[np.argmax(row[ids].astype(np.float64) / params.temperature + noise)])


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@settings(max_examples=150)
@given(row=ROWS, params=PARAMS, position=st.integers(0, 2**20))
def test_the_choice_is_the_definitions(row: Row, params: SamplingParams, position: int) -> None:
    assert choose(row, params, position).token_id == by_definition(row, params, position)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 20.0])
def test_pruning_a_whole_row_never_changes_the_winner(spread: float) -> None:
    rng = np.random.default_rng(1)
    for position in range(40):
        row = (spread * rng.standard_normal(30_001)).astype(np.float32)
        params = SamplingParams(seed=position)
        assert choose(row, params, position).token_id == by_definition(row, params, position)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=5, top_p=0.9, min_p=0.1),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p", "all"],
)
def test_frequencies_follow_the_truncated_distribution(params: SamplingParams) -> None:
    row = np.array([1.0, 0.2, 2.0, -1.0, 1.5, 0.0, -0.5, 1.2], dtype=np.float32)
    kept = np.sort(survivors(row, params))
    weights = np.exp(row[kept].astype(np.float64) / params.temperature)
    draws = 4000
    drawn = [choose(row, params, position).token_id for position in range(draws)]
    assert set(drawn) <= set(kept.tolist())
    counts = np.array([drawn.count(token) for token in kept.tolist()])
    # The 99.99 % quantile of chi-square with 7 degrees of freedom is 29.9; fewer degrees have less.
    assert chi_square(counts, draws * weights / weights.sum()) < 30


def test_other_seeds_draw_independently() -> None:
    row = np.zeros(4, dtype=np.float32)
    pairs = [
        4 * choose(row, SamplingParams(seed=1), p).token_id + choose(row, SamplingParams(seed=2), p).token_id
        for p in range(3200)
    ]
    counts = np.bincount(np.array(pairs), minlength=16)
    assert chi_square(counts, np.full(16, 200.0)) < 45  # 99.99 % with 15 degrees of freedom


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert choose(np.array([0, 3, 3, 1], dtype=np.float32), SamplingParams(temperature=0.0), 0).token_id == 1


def test_an_almost_zero_temperature_is_greedy() -> None:
    row = np.array([0, 3, 2, 1], dtype=np.float32)
    assert choose(row, SamplingParams(temperature=1e-300), 0).token_id == 1


def test_of_equals_at_the_edge_truncation_keeps_the_lowest_ids() -> None:
    row = np.array([1, 5, 5, 5, 5], dtype=np.float32)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.45)):
        assert {choose(row, params, position).token_id for position in range(100)} == {1, 2}


def test_tokens_of_no_probability_are_never_drawn() -> None:
    row = np.full(50, -np.inf, dtype=np.float32)
    row[[7, 31]] = 0.0
    for params in (SamplingParams(), SamplingParams(top_k=10), SamplingParams(top_p=0.99), SamplingParams(min_p=0.5)):
        assert {choose(row, params, position).token_id for position in range(40)} == {7, 31}


def test_logprobs_are_those_of_the_model_whatever_the_temperature() -> None:
    row = np.array([0.0, 2.0, 1.0, 2.0], dtype=np.float32)
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    choice = choose(row, SamplingParams(temperature=0.1, top_k=1, logprobs=3), 0)
    assert choice.logprob == pytest.approx(expected[choice.token_id])
    assert [top.token_id for top in choice.top] == [1, 3, 2]
    assert [top.logprob for top in choice.top] == pytest.approx(expected[[1, 3, 2]])


def test_logprobs_of_the_chosen_token_alone() -> None:
    choice = choose(np.zeros(8, dtype=np.float32), SamplingParams(logprobs=0), 0)
    assert choice.logprob == pytest.approx(-np.log(8))
    assert choice.top == ()
