"""What is found in a prediction of the answer, beside what prompt and answer hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.speculation.lookup import GRAM, TokenIndex

MOST = 8
PROMPT = [7] * 40


def steps(answer: Sequence[int], prediction: Sequence[int], prompt: Sequence[int] = PROMPT) -> tuple[int, int]:
    """Of a model that gives `answer` and takes all that is proposed: how many steps after the first token, and how many
    tokens are proposed in vain."""
    index, tokens = TokenIndex(prediction, len(prompt)), [*prompt, answer[0]]
    count = in_vain = 0
    while len(tokens) < len(prompt) + len(answer):
        index.extend(tokens, 10_000)
        found = index.find(tokens, MOST)
        rest = answer[len(tokens) - len(prompt) :]
        right = 0
        for proposed, chosen in zip(found.tokens if found else (), rest, strict=False):
            if proposed != chosen:
                break
            right += 1
        in_vain += len(found.tokens) - right if found else 0
        tokens += rest[: right + 1]
        count += 1
    return count, in_vain


def text(length: int, seed: int = 0, words: int = 5000) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 100 + words) for _ in range(length)]


def test_an_exact_prediction_is_taken_from_the_first_token_on() -> None:
    answer = text(9 * 20 + 1)
    assert steps(answer, answer) == (20, 0)


def test_an_answer_that_begins_otherwise_comes_to_its_prediction() -> None:
    predicted = text(180)
    count, in_vain = steps([*text(6, seed=1), *predicted], predicted)
    assert count <= 6 + 180 / (MOST + 1) + 1
    assert in_vain <= MOST


@pytest.mark.parametrize("changed", [[], [9], [9, 8], [9, 8, 6, 5, 4]], ids=["removed", "one", "two", "five"])
def test_a_changed_word_interrupts_for_few_steps(changed: list[int]) -> None:
    predicted = text(200)
    answer = [*predicted[:100], *changed, *predicted[102:]]
    count, _ = steps(answer, predicted)
    assert count <= len(answer) / (MOST + 1) + 1.5 + len(changed)


def test_records_that_are_alike_are_told_apart_by_their_place() -> None:
    """Each begins with what ten others begin with too."""
    records = [[1, 2, 3, 4, *text(4, seed=number), 5, 6] for number in range(12)]
    predicted = [token for record in records for token in record]
    answer = list(predicted)
    answer[64] = 99  # in the seventh, of which no number is right any more
    count, in_vain = steps(answer, predicted)
    assert count <= len(answer) / (MOST + 1) + 4
    assert in_vain <= 2 * MOST


def test_a_wrong_prediction_proposes_next_to_nothing() -> None:
    answer = text(300, seed=1)
    count, in_vain = steps(answer, text(300, seed=2))
    assert count == len(answer) - 1
    assert in_vain <= 5 * MOST


def test_of_equal_matches_the_prediction_counts() -> None:
    predicted = text(30)
    index, tokens = TokenIndex(predicted, 30), [*predicted, *predicted[:4]]
    index.extend(tokens, 100)
    found = index.find(tokens, MOST)
    assert found is not None
    assert (found.tokens, found.from_prediction) == (tuple(predicted[4:12]), True)


def test_a_longer_match_elsewhere_goes_before_the_prediction() -> None:
    own = text(30)
    predicted = [*own[9:12], *text(20, seed=3)]
    index, tokens = TokenIndex(predicted, 30), [*own, *own[:12]]
    index.extend(tokens, 100)
    found = index.find(tokens, MOST)
    assert found is not None
    assert (found.tokens, found.from_prediction) == (tuple(own[12:20]), False)


def test_an_answer_that_another_worker_began_finds_its_place() -> None:
    answer = text(200)
    prompt = [*PROMPT, *answer[:100]]
    count, in_vain = steps(answer[100:], answer, prompt)
    assert (count, in_vain) == (99 // (MOST + 1), 0)


def test_long_predictions_are_indexed_in_parts_before_the_prompt() -> None:
    index, tokens = TokenIndex(text(100), 50), text(51)
    assert index.lag(tokens) == 97 + 48
    index.extend(tokens, 90)
    assert index.lag(tokens) == 7 + 48
    index.extend(tokens, 90)
    assert index.lag(tokens) == 0


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 40),
    st.integers(1, MOST),
)
def test_what_is_found_stands_where_it_says(tokens: list[int], prediction: list[int], before: int, most: int) -> None:
    index = TokenIndex(prediction, min(before, len(tokens) - 1))
    for length in range(1, len(tokens) + 1):
        index.extend(tokens[:length], 100)
        found = index.find(tokens[:length], most)
    if found is None:
        return
    source, match = prediction if found.from_prediction else tokens, found.match
    assert 1 <= len(found.tokens) <= most
    assert match >= (1 if found.from_prediction else GRAM)
    assert any(
        source[place - match : place] == tokens[len(tokens) - match :]
        and tuple(source[place : place + len(found.tokens)]) == found.tokens
        for place in range(match, len(source))
    )
