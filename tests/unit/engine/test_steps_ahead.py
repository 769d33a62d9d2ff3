"""Decode steps launched before the tokens of the step before are known: the same tokens, whoever comes, stops, leaves
or is held meanwhile; and no block is given back while a step may write to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.device import sampler as device_sampler
from tandem.engine.engine import TandemEngine
from tandem.engine.output import Launched, StepOutput
from tandem.engine.step import StepInput
from tandem.errors import InternalError
from tandem.kvcache.block_pool import BlockPool
from tandem.request import SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, single_rank
from tandem.testing.models import random_prompt

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40)
KINDS = (GREEDY, SEEDED, replace(GREEDY, max_tokens=7), replace(SEEDED, logprobs=1, max_tokens=25))

Requests = dict[str, tuple[list[int], SamplingParams]]


@dataclass
class Watched:
    """An engine that looks ahead; `ahead` counts how often it did."""

    engine: TandemEngine
    told: list[StepInput] = field(default_factory=list)

    @property
    def repeated(self) -> int:
        """Positions that were computed twice."""
        places = [[(each.start, each.blocks) for each in step.sequences] for step in self.told if step.sequences]
        return sum(place in later for one, later in pairwise(places) for place in one)

    @property
    def ahead(self) -> int:
        return sum(step.ahead for step in self.told)


@pytest.fixture
def watched(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """Of the tiny model, with `options`. A step of it counts as done when somebody has waited for it."""
    waited: set[int] = set()
    wait, release = Launched.wait, BlockPool.release

    def note_wait(launched: Launched) -> StepOutput:
        waited.add(id(launched))
        return wait(launched)

    def make(**options: Any) -> Watched:
        rank = single_rank(model_dir, tmp_path / "ahead", paged=PagedPath(plain_attention, EagerRecorder()), **options)
        engine = rank.engine

        def checked_release(pool: BlockPool, blocks: list[int], *more: Any) -> None:
            flight = engine._flight
            if flight is not None and id(flight.launched) not in waited:
                assert not {block for told in flight.step.sequences for block in told.blocks} & set(blocks)
            release(pool, blocks, *more)

        monkeypatch.setattr(BlockPool, "release", checked_release)
        found = Watched(engine)
        engine._launcher._send_to_followers = found.told.append
        return found

    monkeypatch.setattr(Launched, "wait", note_wait)
    return make


@pytest.fixture(scope="module")
def requests() -> Requests:
    return {str(n): (random_prompt(1 + 17 * n % 70, VOCAB, n), KINDS[n % len(KINDS)]) for n in range(12)}


@pytest.fixture
def expected(model_dir: Path, tmp_path: Path, requests: Requests) -> dict[str, list[int]]:
    """Of an engine that never looks ahead. Some requests now stop at a token that they do not know beforehand."""
    rank = single_rank(model_dir, tmp_path / "plain", kernels="torch")
    answers: dict[str, list[int]] = {}
    for number, (name, (prompt, sampling)) in enumerate(requests.items()):
        driver = EngineDriver(rank.engine)
        driver.add(name, prompt, sampling)
        driver.run()
        answers[name] = driver.tokens[name]
        if number % 3 == 1:
            stop = answers[name][len(answers[name]) // 2]
            answers[name] = answers[name][: answers[name].index(stop) + 1]
            requests[name] = (prompt, replace(sampling, stop_token_ids=frozenset({stop})))
    return answers


@pytest.mark.parametrize(("speculation", "often"), [("none", 20), ("auto", 5)])
def test_requests_that_stop_one_after_the_other(
    watched: Callable[..., Watched], requests: Requests, expected: dict[str, list[int]], speculation: str, often: int
) -> None:
    """`auto` rests when it found nothing for some steps."""
    steady = {name: each for name, each in requests.items() if each[1].logprobs is None}
    ours = watched(max_running_requests=12, speculation=speculation)
    driver = EngineDriver(ours.engine)
    for name, (prompt, sampling) in steady.items():
        driver.add(name, prompt, sampling)
    driver.run()
    assert driver.tokens == {name: expected[name] for name in steady}
    assert driver.at_rest()
    assert ours.ahead > often


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_whoever_comes_leaves_or_is_held_meanwhile(
    watched: Callable[..., Watched], requests: Requests, expected: dict[str, list[int]], seed: int
) -> None:
    """Room for all or for few, so that some are preempted. Cancelled requests have the beginning of their answer."""
    draw = random.Random(seed)
    ours = watched(max_running_requests=12, kv_blocks=draw.choice((64, 24)), max_model_tokens=160)
    driver, waiting, held, cancelled = EngineDriver(ours.engine), list(requests), set[str](), set[str]()
    while waiting or held or ours.engine.has_work:
        if waiting and draw.random() < 0.3:
            name = waiting.pop()
            driver.add(name, *requests[name])
        name = draw.choice([*requests, *list(driver.ends)[-1:] * 6])  # above all whoever has just ended
        if name in held:
            ours.engine.resume(name)
            held.remove(name)
        elif draw.random() < 0.2 and ours.engine.hold(name):
            assert name not in driver.ends
            held.add(name)
        elif draw.random() < 0.05 and name not in {*waiting, *cancelled}:
            assert ours.engine.cancel(name) == (name not in driver.ends)
            cancelled |= {name} - driver.ends.keys()
        before = {each: len(driver.tokens.get(each, [])) for each in held | cancelled}
        driver.take(ours.engine.step())
        assert before == {each: len(driver.tokens.get(each, [])) for each in before}
    for name in requests:
        answer = driver.tokens.get(name, [])
        assert answer == (expected[name][: len(answer)] if name in cancelled else expected[name])
    assert driver.at_rest()
    assert ours.ahead


@pytest.mark.parametrize("ask", [TandemEngine.hold, TandemEngine.cancel])
def test_who_has_ended_can_neither_be_held_nor_cancelled(
    watched: Callable[..., Watched], requests: Requests, expected: dict[str, list[int]], ask: Callable[..., bool]
) -> None:
    """Also while a step is under way that it is in."""
    ours = watched()
    driver = EngineDriver(ours.engine)
    for name in ("1", "8"):
        driver.add(name, *requests[name])
    while "1" not in driver.ends:
        driver.take(ours.engine.step())
    assert ours.told[-1].ahead
    assert len(ours.told[-1].sequences) == 2
    assert not ask(ours.engine, "1")
    driver.run()
    assert driver.tokens == {name: expected[name] for name in ("1", "8")}
    assert driver.at_rest()


def test_the_last_step_of_a_request_is_known_by_its_length(watched: Callable[..., Watched]) -> None:
    """Also with logprobs and penalties, which the device computes."""
    ours = watched()
    driver = EngineDriver(ours.engine)
    driver.add("a", [5, 6, 7], replace(GREEDY, max_tokens=9))
    driver.run()
    assert ours.ahead == 7  # but for the prompt and the first that decodes
    assert len(ours.told) == 9
    driver.add("b", [5, 6, 8], replace(GREEDY, max_tokens=9, logprobs=0))
    driver.add("c", [5, 6, 8], replace(GREEDY, max_tokens=9, frequency_penalty=0.5))
    driver.run()
    assert ours.ahead == 14
    assert len(ours.told) == 18


@pytest.mark.parametrize("candidates", [device_sampler.CANDIDATES, 8])  # 8: many tokens are chosen late
def test_penalties_and_logprobs_ahead_are_those_of_the_host(
    watched: Callable[..., Watched],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    candidates: int,
) -> None:
    monkeypatch.setattr(device_sampler, "CANDIDATES", candidates)
    kinds = (
        GREEDY,
        replace(SEEDED, logprobs=3, repetition_penalty=1.4),
        replace(GREEDY, frequency_penalty=0.8, presence_penalty=0.3, logprobs=0),
        replace(SEEDED, top_k=5, logit_bias=((7, 4.0),), frequency_penalty=-0.5),
        replace(SEEDED, temperature=1.4, top_p=0.98, logprobs=1),
    )
    ours = watched(max_running_requests=8)
    plain = single_rank(model_dir, tmp_path / "plain", kernels="torch").engine
    found = []
    for engine in (ours.engine, plain):
        driver, logprobs = EngineDriver(engine), dict[str, list[float]]()
        for number in range(8):
            driver.add(str(number), random_prompt(5 + 9 * number, VOCAB, number), kinds[number % len(kinds)])
        while engine.has_work:
            result = engine.step()
            driver.take(result)
            for token in result.tokens:
                values = [token.logprob, *(each.logprob for each in token.top)]
                logprobs.setdefault(token.request_id, []).extend(each for each in values if each is not None)
        assert driver.at_rest()
        found.append((driver.tokens, logprobs))
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys()
    for name, told in found[0][1].items():
        assert told == pytest.approx(found[1][1][name], abs=2e-4)
    assert ours.ahead > (25 if candidates > 8 else 5)
    assert candidates > 8 or ours.repeated


def test_a_request_without_numbers_ends_alone_also_with_a_step_ahead(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]], requests: Requests
) -> None:
    ours = watched()
    driver = EngineDriver(ours.engine)
    for name in ("8", "0"):
        driver.add(name, *requests[name])
    plain = Launched.wait
    steps = 0

    def wait(launched: Launched) -> StepOutput:
        nonlocal steps
        steps += 1
        output = plain(launched)
        return replace(output, tokens=[None, *output.tokens[1:]]) if steps == 5 else output

    monkeypatch.setattr(Launched, "wait", wait)
    driver.run()
    assert isinstance(driver.ends["8"], InternalError)
    assert driver.tokens["8"] == expected["8"][: len(driver.tokens["8"])]
    assert driver.tokens["0"] == expected["0"]
    assert driver.at_rest()
