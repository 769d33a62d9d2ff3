import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.model_queue import MIN_OBSERVATIONS, DrainRate


def run(rate: DrainRate, start_s: float, seconds: float, every_s: float, tokens: int) -> float:
    steps = round(seconds / every_s)
    for step in range(1, steps + 1):
        rate.first_token(tokens, start_s + step * every_s)
    return start_s + steps * every_s


@given(st.floats(0.01, 5.0), st.integers(1, 10_000))
def test_a_steady_pace_is_what_is_measured(every_s: float, tokens: int) -> None:
    rate = DrainRate()
    rate.set_waiting(0.0, True)
    run(rate, 0.0, 30.0, every_s, tokens)
    assert rate.tokens_per_s() == pytest.approx(tokens / every_s, rel=0.05)


def test_too_little_was_seen() -> None:
    rate = DrainRate()
    rate.set_waiting(0.0, True)
    for number in range(MIN_OBSERVATIONS - 1):
        rate.first_token(10, 1.0 + number)
    assert rate.tokens_per_s() is None
    rate.first_token(10, 5.0)
    assert rate.tokens_per_s() is not None


def test_what_ends_while_nobody_waits_does_not_count() -> None:
    rate = DrainRate()
    run(rate, 0.0, 100.0, 1.0, 10)
    assert rate.tokens_per_s() is None
    rate.set_waiting(100.0, True)
    now_s = run(rate, 100.0, 20.0, 0.1, 10)
    rate.set_waiting(now_s, False)
    run(rate, now_s, 100.0, 10.0, 10)
    rate.set_waiting(now_s + 500.0, True)
    assert rate.tokens_per_s() == pytest.approx(100.0, rel=0.05)


def test_it_follows_a_pool_that_changes() -> None:
    rate = DrainRate()
    rate.set_waiting(0.0, True)
    now_s = run(rate, 0.0, 30.0, 0.1, 10)
    now_s = run(rate, now_s, 30.0, 0.1, 30)
    assert rate.tokens_per_s() == pytest.approx(300.0, rel=0.1)


def test_a_pool_that_stands_still_is_known_to_be_slow() -> None:
    rate = DrainRate()
    rate.set_waiting(0.0, True)
    now_s = run(rate, 0.0, 30.0, 0.1, 10)
    rate.set_waiting(now_s + 30.0, True)
    measured = rate.tokens_per_s()
    assert measured is not None
    assert measured < 10.0
