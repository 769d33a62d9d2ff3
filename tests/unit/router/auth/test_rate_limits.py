"""Token buckets: what passes, how long to wait, and how the length of an answer delays the next request."""

from __future__ import annotations

import pytest

from router.auth.call_gate import CallGate
from router.auth.principal import AccessLevel, Principal
from router.auth.rate_limits import RateLimiter
from tandem.config.auth import AuthSpec, LimitsSpec
from tandem.errors import RateLimited
from tandem.request import RequestState
from tandem.testing.models import FakeClock


def key(name: str = "k", **limits: int) -> Principal:
    return Principal(name, "acme", limits=LimitsSpec(**limits))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def limiter(clock: FakeClock) -> RateLimiter:
    return RateLimiter(clock)


def test_a_bucket_holds_one_minutes_worth_and_refills(limiter: RateLimiter, clock: FakeClock) -> None:
    few = key(requests_per_minute=6)
    for _ in range(6):
        limiter.take_request(few)
    with pytest.raises(RateLimited) as refused:
        limiter.take_request(few)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    clock.advance(refused.value.retry_after_s or 0.0)
    limiter.take_request(few)
    with pytest.raises(RateLimited):
        limiter.take_request(few)
    limiter.take_request(key("another", requests_per_minute=6))
    for _ in range(1000):
        limiter.take_request(key("unlimited"))


def test_over_time_a_key_gets_its_rate_and_no_more(limiter: RateLimiter, clock: FakeClock) -> None:
    few, taken = key(requests_per_minute=30), 0
    for _ in range(6000):
        clock.advance(0.1)
        try:
            limiter.take_request(few)
            taken += 1
        except RateLimited:
            pass
    assert abs(taken - (30 + 30 * 10)) <= 1


def test_the_tokens_of_an_answer_count_at_its_end(limiter: RateLimiter, clock: FakeClock) -> None:
    some = key(tokens_per_minute=600)
    limiter.check_tokens(some, 500)
    limiter.spend_tokens(some, 500)
    limiter.spend_tokens(some, 400)  # the answer: 300 below zero
    with pytest.raises(RateLimited) as refused:
        limiter.check_tokens(some, 100)
    assert refused.value.retry_after_s == pytest.approx(40.0)
    clock.advance(40.0)
    limiter.check_tokens(some, 100)


def test_a_prompt_larger_than_a_minutes_worth_waits_for_a_full_bucket(limiter: RateLimiter, clock: FakeClock) -> None:
    some = key(tokens_per_minute=60)
    limiter.check_tokens(some, 5000)
    limiter.spend_tokens(some, 120)
    with pytest.raises(RateLimited) as refused:
        limiter.check_tokens(some, 5000)
    assert refused.value.retry_after_s == pytest.approx(120.0)


def test_a_changed_limit_applies_at_once(limiter: RateLimiter) -> None:
    for _ in range(2):
        limiter.take_request(key(requests_per_minute=2))
    with pytest.raises(RateLimited):
        limiter.take_request(key(requests_per_minute=100))
    assert limiter._buckets["k", "requests"].per_minute == 100


def test_many_keys_do_not_stay_in_memory(limiter: RateLimiter, clock: FakeClock) -> None:
    for number in range(25_000):
        clock.advance(0.1)
        limiter.take_request(key(f"jwt:{number}", requests_per_minute=60))
    assert len(limiter._buckets) <= 10_001


def test_answers_of_a_call_that_goes_on_are_counted_once(clock: FakeClock) -> None:
    """As those of a stream with many requests, which may last for hours."""
    gate = CallGate(AuthSpec(), "router-0", None, clock, lambda refused: None)
    call = gate.begin("ModelStreamInfer", AccessLevel.CALLER, "", "r", "")
    call.principal = key(tokens_per_minute=60)
    for _ in range(2):
        call.ended(RequestState.FINISHED, None, 40)
        gate.spend(call)
    with pytest.raises(RateLimited) as refused:
        call.check_prompt(1)
    gate.finish(call)
    with pytest.raises(RateLimited) as again:
        call.check_prompt(1)
    assert again.value.retry_after_s == refused.value.retry_after_s
