"""Static and dynamic batching change when an answer begins, and nothing of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank
from tandem.grammar.constraint import regex
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EngineDriver, make_request, single_rank
from tandem.testing.models import FakeClock, random_prompt, write_tiny_llama
from tests.conftest import Reference

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=12, frequency_penalty=0.5)
AT_ONCE = {"batching_window_s": 0.0}


def without_time(engine: TandemEngine) -> TandemEngine:
    """No window ends before its batch is full, however slow the machine is."""
    engine._clock = engine._intake._clock = FakeClock()
    return engine


def prompt(length: int) -> list[int]:
    return random_prompt(length, VOCAB, length)


def answers(driver: EngineDriver) -> dict[str, list[int]]:
    """Of ten requests, four of which come while others run."""
    lengths = (1, 15, 16, 33, 70, 5, 40, 17, 3, 90)
    for number, length in enumerate(lengths):
        kind = GREEDY if number % 2 else SEEDED
        driver.add(str(number), prompt(length), replace(kind, seed=number, max_tokens=15 + 2 * number))
        if number >= 6:
            driver.engine.collect()
            driver.take(driver.engine.step())
    driver.run()
    assert driver.at_rest()
    assert set(driver.ends.values()) == {FinishReason.LENGTH}
    return driver.tokens


@pytest.mark.parametrize("batching", ["static", "dynamic"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_blocks": 8},
        {"max_step_tokens": 16, "speculation": "lookup"},
        {"kv_blocks": 24, "host_kv_memory_bytes": 1 << 20, "max_running_requests": 3},
    ],
    ids=["at ease", "preempted", "speculating", "with a host tier"],
)
def test_answers_are_those_of_continuous_batching(
    make: Callable[..., Rank], batching: str, options: dict[str, object]
) -> None:
    expected = answers(EngineDriver(make(batch_invariant=True).engine))
    driver = EngineDriver(make(batch_invariant=True, batching=batching, **AT_ONCE, **options).engine)
    assert answers(driver) == expected
    assert options.get("kv_blocks") != 8 or driver.engine.preemptions > 0


def test_no_request_joins_a_batch_that_runs(make: Callable[..., Rank]) -> None:
    engine = without_time(make(batching="static", max_running_requests=3).engine)
    driver = EngineDriver(engine)
    for number in range(3):
        assert not engine.has_work
        driver.add(str(number), prompt(5 + number), replace(GREEDY, max_tokens=4 + 4 * number))
        assert number == 2 or engine.collect() is not None
    assert engine.collect() is None, "it is full"
    driver.take(engine.step())
    for number in range(3, 6):
        driver.add(str(number), prompt(5 + number), GREEDY)
    while "2" not in driver.ends:
        assert engine.collect() is None
        driver.take(engine.step())
        assert set(driver.tokens) == {"0", "1", "2"}
    driver.run()
    assert set(driver.ends) == set("012345")
    assert driver.at_rest()


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_the_last_request_begins_when_its_window_is_over(make: Callable[..., Rank], batching: str) -> None:
    engine = make(batching=batching, batching_window_s=0.02).engine
    driver = EngineDriver(engine)
    driver.add("r", prompt(5), GREEDY)
    assert not engine.has_work
    left_s = engine.collect()
    assert left_s is None or left_s <= 0.02
    driver.run()
    assert driver.ends["r"] is FinishReason.LENGTH


def test_cancelling_a_whole_batch_lets_the_next_begin(make: Callable[..., Rank], reference: Reference) -> None:
    engine = make(batching="static", max_running_requests=2, batching_window_s=2.0).engine
    driver = EngineDriver(engine)
    for number in range(4):
        driver.add(str(number), prompt(5 + number), GREEDY)
    engine.collect()
    driver.take(engine.step())
    assert engine.cancel("0")
    assert engine.cancel("1")
    assert engine.collect() is None
    driver.run()
    assert driver.tokens["3"] == reference.answer(prompt(8), GREEDY)
    assert engine.cancel("0") is False
    assert driver.at_rest()


def test_constrained_answers_and_cached_prefixes_share_a_batch(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", vocab=VOCAB, seed=1, eos_token_id=2)
    rank = single_rank(model, tmp_path / "rendezvous", batching="static", max_running_requests=3)
    driver = EngineDriver(without_time(rank.engine))
    digits = replace(GREEDY, grammar=regex("[0-9]{3,5}", "grammar").grammar, stop_token_ids=frozenset({2}))
    for name, sampling in (("a", GREEDY), ("b", GREEDY), ("digits", digits)):
        driver.add(name, prompt(40), sampling)
    driver.run()
    assert driver.tokens["a"] == driver.tokens["b"]
    assert driver.cached == {"a": 0, "b": 32, "digits": 32}
    assert driver.ends["digits"] is FinishReason.STOP
    assert driver.at_rest()


def test_a_moved_answer_goes_on_beside_the_batch(make: Callable[..., Rank], reference: Reference) -> None:
    """Its first tokens were given elsewhere, and its client waits for the next."""
    source, target = (make(batching="static", **AT_ONCE) for _ in range(2))
    s, t = EngineDriver(source.engine), EngineDriver(target.engine)
    s.add("moved", prompt(20), GREEDY)
    t.add("here", prompt(9), replace(GREEDY, max_tokens=30))
    for driver in (s, t):
        driver.engine.collect()
        while len(next(iter(driver.tokens.values()), ())) < 3:
            driver.take(driver.engine.step())
    answer = s.tokens["moved"]
    assert source.engine.hold("moved")
    had = len(answer) - 1
    request = make_request(
        "moved", [*prompt(20), *answer[:-1]], replace(GREEDY, max_tokens=12 - had), answered_tokens=had
    )
    reservation = target.engine.reserve(request)
    blocks = source.engine._scheduler._sequences["moved"].blocks
    for mine, theirs in zip(reservation.block_ids, blocks, strict=True):
        target.pool.tensor[mine] = source.pool.tensor[theirs]
    assert source.engine.cancel("moved")
    target.engine.join("moved", answer[-1])
    t.add("next", prompt(7), GREEDY)
    t.take(target.engine.step())
    assert set(t.tokens) == {"here", "moved"}
    t.run()
    assert [*answer, *t.tokens["moved"]] == reference.answer(prompt(20), GREEDY)
    assert t.tokens["next"] == reference.answer(prompt(7), GREEDY)
    assert s.at_rest()
    assert t.at_rest()


def test_a_worker_that_waits_for_a_batch_is_collecting_and_not_stalled(make: Callable[..., Rank]) -> None:
    engine = without_time(make(batching="static").engine)
    assert not engine.is_collecting
    engine.add(make_request("first", prompt(5), GREEDY))
    assert engine.is_collecting


def test_a_batch_that_waits_for_a_move_to_end_is_collecting(make: Callable[..., Rank]) -> None:
    driver = EngineDriver(make(batching="static", max_running_requests=1, **AT_ONCE).engine)
    driver.add("moved", prompt(20), GREEDY)
    driver.engine.collect()
    while len(driver.tokens.get("moved", ())) < 3:
        driver.take(driver.engine.step())
    driver.add("next", prompt(9), GREEDY)
    assert not driver.engine.is_collecting
    assert driver.engine.hold("moved")
    assert driver.engine.collect() is None
    assert driver.engine.is_collecting
    assert driver.engine.cancel("moved")
    driver.run()
    assert driver.ends["next"] is FinishReason.LENGTH
    assert driver.at_rest()


def test_with_continuous_batching_a_worker_is_never_collecting(make: Callable[..., Rank]) -> None:
    engine = make().engine
    engine.add(make_request("first", prompt(5), GREEDY))
    assert engine.collect() is None
    assert not engine.is_collecting
