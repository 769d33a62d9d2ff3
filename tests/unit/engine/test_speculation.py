"""Proposed tokens change how many steps an answer takes, and nothing of the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine.api import Proposals, StepResult
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.engine import TandemEngine
from tandem.engine.factory import Rank
from tandem.engine.output import Launched
from tandem.engine.step import StepInput
from tandem.grammar.constraint import json_schema
from tandem.request import FinishReason, SamplingParams
from tandem.speculation.proposers import Candidate, Proposal
from tandem.speculation.speculator import Speculator, Step
from tandem.speculation.text_proposers import Lookup
from tandem.testing.engine import EngineDriver, Exported, answer_that_moves, make_request, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference, write_family

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=4, max_tokens=24)
PENALISED = replace(SEEDED, frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.2)
SCORED = replace(SEEDED, logprobs=2)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED, "scored": SCORED}
MOST = 5


class Scripted(Speculator):
    """Proposes what it knows the answers to be, as far as a drawn place, and something else there."""

    def __init__(self, texts: Iterable[Sequence[int]], seed: int = 0) -> None:
        super().__init__(MOST, Lookup())
        self._texts = [list(text) for text in texts]
        self._draw = random.Random(seed)
        self.steps = 0

    def propose(self, candidates: Sequence[Candidate], step: Step) -> list[Proposal]:
        self.steps += 1
        proposals, room = list[Proposal](), step.room
        for each in candidates:
            proposals.append(Proposal(self._proposed(each)[:room]))
            room -= len(proposals[-1].tokens)
        return proposals

    def _proposed(self, candidate: Candidate) -> tuple[int, ...]:
        length = len(candidate.tokens)
        text = next(each for each in self._texts if each[:length] == candidate.tokens)
        proposed = text[length : length + self._draw.randint(0, max(0, min(MOST, candidate.most)))]
        if proposed and self._draw.random() < 0.5:
            wrong = self._draw.randrange(len(proposed))
            proposed[wrong] = (proposed[wrong] + 1) % VOCAB
        return tuple(proposed)


def scripted(engine: TandemEngine, speculator: Speculator) -> EngineDriver:
    engine._scheduler.speculator = speculator
    return EngineDriver(engine)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


Asked = dict[str, tuple[list[int], SamplingParams]]
LENGTHS = (1, 15, 16, 17, 30, 100)


def asked(names: Iterable[str] = KINDS) -> Asked:
    return {f"{name} {n}": (prompt(n, n), replace(KINDS[name], seed=n)) for name in names for n in LENGTHS}


def run(driver: EngineDriver, requests: Asked) -> dict[str, list[int]]:
    for name, (tokens, sampling) in requests.items():
        driver.add(name, tokens, sampling)
    driver.run()
    assert driver.at_rest()
    assert set(driver.ends.values()) == {FinishReason.LENGTH}
    return driver.tokens


def texts(requests: Asked, answers: dict[str, list[int]]) -> list[list[int]]:
    return [[*requests[name][0], *answer] for name, answer in answers.items()]


@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3))])
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_blocks": 16}, {"max_step_tokens": 16}, {"kv_blocks": 24, "host_kv_memory_bytes": 1 << 20}],
    ids=["at ease", "preempted", "with a small budget", "with a host tier"],
)
def test_answers_are_the_same_with_whatever_is_proposed(
    make: Callable[..., Rank], seed: int, options: dict[str, int]
) -> None:
    """All kinds of requests in one batch."""
    requests = asked()
    expected = run(EngineDriver(make(batch_invariant=True).engine), requests)
    speculator = Scripted(texts(requests, expected), seed)
    driver = scripted(make(batch_invariant=True, speculation="lookup", **options).engine, speculator)
    assert run(driver, requests) == expected
    assert 0 < speculator.accepted < speculator.proposed
    assert "kv_blocks" not in options or options["kv_blocks"] > 16 or driver.engine.preemptions > 0


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalised"])
def test_alone_it_answers_as_the_reference_in_fewer_steps(
    make: Callable[..., Rank], reference: Reference, kind: str
) -> None:
    expected = reference.answer(prompt(40), KINDS[kind])
    speculator = Scripted([[*prompt(40), *expected]])
    driver = scripted(make(speculation="lookup").engine, speculator)
    driver.add("a", prompt(40), KINDS[kind])
    driver.run()
    assert driver.tokens["a"] == expected
    assert speculator.steps < len(expected) / 1.5


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_and_what_they_release(tmp_path: Path, family: str) -> None:
    model = write_family(tmp_path / "model", family)
    sampling = replace(GREEDY, max_tokens=120)
    requests = {str(n): (random_prompt(n, VOCAB, n), sampling) for n in (3, 40, 90)}
    expected = run(EngineDriver(single_rank(model, tmp_path / "a", batch_invariant=True).engine), requests)
    engine = single_rank(model, tmp_path / "b", batch_invariant=True, speculation="lookup").engine
    assert run(scripted(engine, Scripted(texts(requests, expected))), requests) == expected


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_look_up_finds_what_came_before(make: Callable[..., Rank], kv_dtype: str) -> None:
    """A bias towards few tokens makes answers that repeat themselves."""
    sampling = replace(SEEDED, temperature=0.3, max_tokens=80, logit_bias=tuple((token, 14.0) for token in range(3, 6)))
    requests = {str(n): (prompt(n, n) * 2, replace(sampling, seed=n)) for n in (5, 20, 33)}
    expected = run(EngineDriver(make(batch_invariant=True, kv_dtype=kv_dtype).engine), requests)
    driver = EngineDriver(make(batch_invariant=True, kv_dtype=kv_dtype, speculation="lookup").engine)
    assert run(driver, requests) == expected
    speculator = driver.engine.speculator
    assert speculator is not None
    assert speculator.accepted > 0


class Counting(EngineDriver):
    """Counts proposals by request, and steps."""

    def __init__(self, engine: TandemEngine) -> None:
        super().__init__(engine)
        self.proposals: dict[str, list[Proposals]] = {}
        self.steps = 0

    def take(self, result: StepResult) -> None:
        super().take(result)
        self.steps += 1
        for token in result.tokens:
            if token.proposals is not None:
                self.proposals.setdefault(token.request_id, []).append(token.proposals)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_prediction_saves_steps_and_a_wrong_one_changes_nothing(make: Callable[..., Rank], kind: str) -> None:
    sampling, given = replace(KINDS[kind], max_tokens=60), prompt(40)
    (expected,) = run(EngineDriver(make(batch_invariant=True).engine), {"r": (given, sampling)}).values()
    for prediction, at_most in ((expected, 8), (prompt(60, seed=9), 61)):
        driver = Counting(make(batch_invariant=True, speculation="lookup", speculation_adaptive=False).engine)
        driver.add("r", given, sampling, prediction=tuple(prediction))
        driver.run()
        assert driver.tokens["r"] == expected
        assert driver.at_rest()
        assert driver.steps <= at_most
        if prediction == expected:
            proposals = driver.proposals["r"]
            assert all(each.accepted == each.proposed > 0 and each.from_prediction for each in proposals)
            assert sum(each.accepted for each in proposals) == 60 - driver.steps


def test_a_prediction_reaches_no_other_request(make: Callable[..., Rank]) -> None:
    """Neither one of the same prompt beside it, nor a later one, nor the hashes of cached blocks."""
    sampling, given = replace(GREEDY, max_tokens=60), prompt(40)
    (expected,) = run(EngineDriver(make(batch_invariant=True).engine), {"r": (given, sampling)}).values()
    driver = Counting(make(batch_invariant=True, speculation="lookup", speculation_adaptive=False).engine)
    driver.add("with", given, sampling, prediction=tuple(expected))
    driver.add("beside", given, sampling)
    driver.run()
    driver.add("later", given, sampling)
    driver.run()
    assert driver.tokens == dict.fromkeys(("with", "beside", "later"), expected)
    assert driver.cached["later"] == 32  # the prompt's whole blocks
    assert all(each.from_prediction for each in driver.proposals["with"])
    others = [each for name in ("beside", "later") for each in driver.proposals.get(name, ())]
    assert not any(each.from_prediction for each in others)
    assert sum(each.accepted for each in others) < sum(each.accepted for each in driver.proposals["with"]) / 2


@pytest.mark.parametrize("prediction", [(5,) * 65, (5, VOCAB), (5, -1)], ids=["too long", "unknown", "negative"])
def test_no_answer_fails_for_a_prediction_that_it_cannot_be(
    make: Callable[..., Rank], reference: Reference, prediction: tuple[int, ...]
) -> None:
    driver = EngineDriver(make(speculation="lookup", max_model_tokens=64).engine)
    driver.add("r", prompt(4), GREEDY, prediction=prediction)
    driver.run()
    assert driver.tokens["r"] == reference.answer(prompt(4), GREEDY)


def test_a_stop_token_among_accepted_ones_ends_the_answer_with_it(
    make: Callable[..., Rank], reference: Reference
) -> None:
    whole = reference.answer(prompt(20), GREEDY)
    for stop in whole[1:]:
        sampling = replace(GREEDY, stop_token_ids=frozenset({stop}))
        driver = scripted(make(speculation="lookup").engine, Scripted([[*prompt(20), *whole]]))
        driver.add("r", prompt(20), sampling)
        driver.run()
        assert driver.tokens["r"] == whole[: whole.index(stop) + 1]
        assert driver.ends["r"] is FinishReason.STOP
        assert driver.at_rest()


def test_later_prompts_find_no_refused_token_in_the_cache(make: Callable[..., Rank], reference: Reference) -> None:
    whole = reference.answer(prompt(20), GREEDY)
    speculator = Scripted([[*prompt(20), *whole]], seed=5)
    driver = scripted(make(speculation="lookup").engine, speculator)
    driver.add("r", prompt(20), GREEDY)
    driver.run()
    assert speculator.accepted < speculator.proposed
    again = [*prompt(20), *whole[:20]]
    expected = reference.answer(again, GREEDY)
    driver.engine._scheduler.speculator = None
    driver.add("again", again, GREEDY)
    driver.run()
    assert driver.cached["again"] == 32
    assert driver.tokens["again"] == expected


@pytest.mark.parametrize("kind", ["greedy", "penalised"])
@pytest.mark.parametrize("given", [1, 2, 5, 9, 14, 20])
def test_an_answer_that_moves_after_any_token_goes_on_the_same(
    make: Callable[..., Rank], reference: Reference, kind: str, given: int
) -> None:
    """Both engines speculate. The first gives perhaps some tokens more than it was waited for."""
    expected = reference.answer(prompt(20), KINDS[kind])
    exported, whole = Exported(), [*prompt(20), *expected]
    source, target = make(exporter=exported, speculation="lookup"), make(speculation="lookup")
    drivers = scripted(source.engine, Scripted([whole], given)), scripted(target.engine, Scripted([whole], given + 1))
    request = make_request("r", prompt(20), KINDS[kind])
    assert answer_that_moves(source, exported, drivers, target, request, given) == expected
    assert all(driver.at_rest() for driver in drivers)


def test_cancelling_at_any_step_frees_everything(make: Callable[..., Rank], reference: Reference) -> None:
    whole = [*prompt(40), *reference.answer(prompt(40), GREEDY)]
    for steps in range(12):
        driver = scripted(make(speculation="lookup", max_step_tokens=16).engine, Scripted([whole], steps))
        driver.add("r", prompt(40), GREEDY)
        for _ in range(steps):
            driver.take(driver.engine.step())
        driver.engine.cancel("r")
        assert driver.at_rest()


def test_a_device_draws_after_each_proposed_token(model_dir: Path, tmp_path: Path) -> None:
    """The path of a GPU, with attention in torch. Requests with penalties go on one by one."""
    requests = asked()
    paged = PagedPath(plain_attention, None)
    expected = run(EngineDriver(single_rank(model_dir, tmp_path / "a", paged=paged).engine), requests)
    speculator = Scripted(texts(requests, expected))
    engine = single_rank(model_dir, tmp_path / "b", paged=paged, speculation="lookup").engine
    assert run(scripted(engine, speculator), requests) == expected
    assert speculator.accepted > 0


SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 3, "maxItems": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["capital", "village"]},
    },
    "required": ["names", "count", "kind"],
    "additionalProperties": False,
}
EOS = 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_grammar_refuses_what_it_would_without_proposals(tmp_path: Path, seed: int, logprobs: int | None) -> None:
    """Also where forced tokens follow accepted ones."""
    model = write_tiny_llama(tmp_path / "model", vocab=VOCAB, seed=1, eos_token_id=EOS)
    ended = SamplingParams(
        temperature=0.9 * (seed % 2), seed=seed, max_tokens=200, stop_token_ids=frozenset({EOS}), logprobs=logprobs,
        grammar=json_schema(SCHEMA, "").grammar, frequency_penalty=0.2 * (seed % 3),
    )  # fmt: skip
    requests = {str(n): (prompt(n, seed), ended) for n in (3, 20)}

    def engine(name: str, **options: str) -> TandemEngine:
        found = single_rank(model, tmp_path / name, batch_invariant=True, **options).engine  # type: ignore[arg-type]
        return found

    def answers(driver: EngineDriver) -> dict[str, list[int]]:
        for name, (tokens, sampling) in requests.items():
            driver.add(name, tokens, sampling)
        driver.run()
        assert driver.at_rest()
        assert set(driver.ends.values()) == {FinishReason.STOP}
        return driver.tokens

    expected = answers(EngineDriver(engine("a")))
    speculator = Scripted(texts(requests, expected), seed)
    assert answers(scripted(engine("b", speculation="lookup"), speculator)) == expected
    assert speculator.accepted > 0


def test_a_step_that_fails_with_proposals_runs_without_and_ends_nobody(
    make: Callable[..., Rank], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when many rows of logits do not fit."""
    rank = make(speculation="lookup")
    launch = rank.runner.launch

    def failing(step: StepInput) -> Launched | None:
        if any(each.samples > 1 for each in step.sequences):
            raise torch.OutOfMemoryError("allocate memory")
        return launch(step)

    monkeypatch.setattr(rank.runner, "launch", failing)
    requests = {str(n): (prompt(n), GREEDY) for n in (16, 40)}
    expected = {name: reference.answer(tokens, sampling) for name, (tokens, sampling) in requests.items()}
    assert run(scripted(rank.engine, Scripted(texts(requests, expected))), requests) == expected


def test_blocks_that_handoffs_hold_teach_nothing(make: Callable[..., Rank]) -> None:
    """A step in which nothing can run, before the first that decodes."""
    driver = EngineDriver(make(kv_blocks=8, speculation="lookup").engine)
    driver.engine.reserve(make_request("leased", prompt(100), GREEDY))
    driver.add("waits", prompt(90), GREEDY)
    driver.take(driver.engine.step())
    driver.engine.cancel("leased")
    driver.run()
    assert driver.ends["waits"] is FinishReason.LENGTH
