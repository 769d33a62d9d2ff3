"""Answers that satisfy a grammar: valid, the same on any engine, whatever interrupts them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import jsonschema
import llguidance
import pytest

from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.factory import Rank
from tandem.errors import InputError, RequestFailed
from tandem.grammar import compiler, masks
from tandem.grammar.compiler import Matcher
from tandem.grammar.constraint import choice, json_schema, lark, regex
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, make_request, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tests.conftest import Reference

VOCAB = 300
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "city_name": {"type": "string", "maxLength": 6},
        "population": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["capital", "village"]},
    },
    "required": ["city_name", "population", "kind"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=200, stop_token_ids=frozenset({EOS}), grammar=json_schema(SCHEMA, "").grammar
)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=3, frequency_penalty=0.2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, seed=1, eos_token_id=EOS)


# Where tokens are chosen: by the host, or by the device after steps that were launched, or replayed.
PATHS: dict[str, Callable[[], PagedPath | None]] = {
    "host": lambda: None,
    "device": lambda: PagedPath(plain_attention, None),
    "replayed": lambda: PagedPath(plain_attention, EagerRecorder()),
}


@pytest.fixture(params=["host", "device", pytest.param("replayed", marks=pytest.mark.slow)])
def make(model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Rank]:
    return lambda **options: single_rank(
        model_dir, tmp_path / "rendezvous", paged=PATHS[request.param](), kernels="torch", **options
    )


def prompt(length: int) -> list[int]:
    return random_prompt(length, VOCAB)


def answer(rank: Rank, sampling: SamplingParams, length: int = 20) -> list[int]:
    driver = EngineDriver(rank.engine)
    driver.add("alone", prompt(length), sampling)
    driver.run()
    assert driver.ends["alone"] is FinishReason.STOP
    assert driver.at_rest()
    return driver.tokens["alone"]


def text(model_dir: Path, tokens: list[int]) -> str:
    return Tokenizer.load(model_dir).decode(tokens)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_satisfies_its_schema(make: Callable[..., Rank], model_dir: Path, sampling: SamplingParams) -> None:
    jsonschema.validate(json.loads(text(model_dir, answer(make(), sampling))), SCHEMA)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (regex("[0-9]{3}-[a-f]{2}", "").grammar, r"\d{3}-[a-f]{2}"),
        (choice(["alpha", 'be"ta', "gamma\n"], "").grammar, r'alpha|be"ta|gamma\n'),
        (choice([f"{number} of many" for number in range(1024)], "").grammar, r"\d{1,4} of many"),
        (lark('start: "a" start "b" | "c"', "").grammar, r"a*cb*"),
    ],
    ids=["regex", "choice", "choices", "lark"],
)
def test_each_kind_of_grammar_holds(make: Callable[..., Rank], model_dir: Path, grammar: str, expected: str) -> None:
    for seed in range(5):
        found = text(model_dir, answer(make(), replace(SEEDED, grammar=grammar, seed=seed)))
        assert re.fullmatch(expected, found), found


def test_free_requests_beside_a_constrained_one_are_left_alone(
    make: Callable[..., Rank], model_dir: Path, reference_for: Callable[[Path], Reference]
) -> None:
    free = SamplingParams(temperature=0.7, seed=3, max_tokens=30)
    rank = make()
    driver = EngineDriver(rank.engine)
    driver.add("a", prompt(20), GREEDY)
    driver.add("b", prompt(33), free)
    driver.run()
    assert driver.tokens["b"] == reference_for(model_dir).answer(prompt(33), free)
    assert driver.tokens["a"] == answer(rank, GREEDY)


@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=pytest.mark.slow), SEEDED], ids=["greedy", "seeded"])
def test_another_engine_goes_on_alike_from_every_token(make: Callable[..., Rank], sampling: SamplingParams) -> None:
    whole = answer(make(), sampling)
    other = EngineDriver(make(kv_blocks=1024).engine)
    for given in range(1, len(whole)):
        rest = replace(sampling, max_tokens=sampling.max_tokens - given)
        other.engine.add(make_request(f"r{given}", [*prompt(20), *whole[:given]], rest, answered_tokens=given))
        other.run()
        assert whole[:given] + other.tokens[f"r{given}"] == whole, given
        joined = make_request(f"j{given}", [*prompt(20), *whole[: given - 1]], rest, answered_tokens=given - 1)
        other.engine.reserve(joined)
        other.engine.join(f"j{given}", whole[given - 1])
        other.run()  # of KV that nobody wrote: what is forced is the same all the same
        assert other.ends[f"j{given}"] is not None
    assert other.at_rest()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_forced_tokens_are_those_that_are_found_one_by_one(make: Callable[..., Rank], sampling: SamplingParams) -> None:
    rank = make()
    steps, driver = 0, EngineDriver(rank.engine)
    driver.add("a", prompt(20), sampling)
    while driver.engine.has_work:
        driver.take(driver.engine.step())
        steps += 1
    assert driver.tokens["a"] == answer(rank, replace(sampling, logprobs=0))
    assert steps < len(driver.tokens["a"])  # several in one step


def test_the_device_chooses_what_the_host_would(model_dir: Path, tmp_path: Path) -> None:
    """Also beside free rows, with all that changes logits or asks for logprobs."""
    kinds = [
        GREEDY,
        SEEDED,
        replace(SEEDED, top_k=5, seed=7),
        replace(SEEDED, min_p=0.05, seed=8, logprobs=3),
        replace(GREEDY, logprobs=0, repetition_penalty=1.3, logit_bias=((40, 2.0),)),
        replace(SEEDED, grammar=None, max_tokens=40),
    ]
    found = []
    for path in PATHS.values():
        rank = single_rank(model_dir, tmp_path / "rendezvous", paged=path(), kernels="torch", kv_blocks=400)
        driver = EngineDriver(rank.engine)
        tops: dict[str, list[tuple[int, ...]]] = {}
        for number, sampling in enumerate(kinds):
            driver.add(f"{number}", prompt(20 + number), sampling)
        while driver.engine.has_work:
            result = driver.engine.step()
            driver.take(result)
            for token in result.tokens:
                tops.setdefault(token.request_id, []).append(tuple(each.token_id for each in token.top))
        assert driver.at_rest()
        found.append((driver.tokens, driver.ends, tops))
    assert found[1:] == found[:1] * 2


def test_a_preempted_answer_goes_on_alike(make: Callable[..., Rank]) -> None:
    lengths = (40, 41, 42)
    alone = [answer(make(), SEEDED, length) for length in lengths]
    driver = EngineDriver(make(kv_blocks=12).engine)
    for length in lengths:
        driver.add(f"{length}", prompt(length), SEEDED)
    driver.run()
    assert driver.engine.preemptions
    assert [driver.tokens[f"{length}"] for length in lengths] == alone
    assert driver.at_rest()


def test_logprobs_are_those_of_the_free_model(make: Callable[..., Rank]) -> None:
    rank, scored = make(), replace(GREEDY, logprobs=2, max_tokens=1)
    free = replace(scored, grammar=None)
    results = {}
    for name, sampling in (("constrained", scored), ("free", free)):
        rank.engine.add(make_request(name, prompt(20), sampling))
        while rank.engine.has_work:
            for token in rank.engine.step().tokens:
                results[name] = token
    for one, other in zip(results["constrained"].top, results["free"].top, strict=True):  # its prompt was cached
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert results["constrained"].token_id != results["free"].token_id


def test_ignored_ends_follow_only_where_nothing_else_may(make: Callable[..., Rank], model_dir: Path) -> None:
    sampling = replace(SEEDED, stop_token_ids=frozenset(), grammar=regex("[ab]{1,9}", "").grammar)
    assert len(text(model_dir, answer(make(), sampling))) == 9


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (lark("start: missing", "").grammar, "unknown name"),
        (lark("start: start", "").grammar, "use a simpler one"),
        (json_schema({"type": "object", "not": {}}, "").grammar, "not"),
        ("{", "grammar: "),
        ("x" * 300_000, "at most 65536 bytes"),
    ],
    ids=["unknown", "empty", "unsupported", "broken", "huge"],
)
def test_a_grammar_that_cannot_be_used_ends_its_request_alone(
    make: Callable[..., Rank], grammar: str, reason: str
) -> None:
    driver = EngineDriver(make().engine)
    driver.add("bad", prompt(20), replace(GREEDY, grammar=grammar))
    driver.add("good", prompt(33), replace(GREEDY, grammar=None, max_tokens=9))
    driver.run()
    error = driver.ends["bad"]
    assert isinstance(error, InputError)
    assert reason in str(error)
    assert len(driver.tokens["good"]) == 9
    assert driver.at_rest()


def test_a_grammar_that_is_late_delays_no_other_request_and_ends_its_own(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MAX_LATE_S", 0.0)
    ended = Event()
    monkeypatch.setattr(Matcher, "allowed", lambda *_: ended.wait(60))
    driver = EngineDriver(make().engine)
    driver.add("late", prompt(20), GREEDY)
    driver.add("good", prompt(33), replace(GREEDY, grammar=None, max_tokens=9))
    driver.run()
    ended.set()
    assert isinstance(driver.ends["late"], RequestFailed)
    assert len(driver.tokens["good"]) == 9
    assert driver.at_rest()


def test_a_late_grammar_sits_out_the_steps_of_others(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not computed in vain, nor waited for again, and its answer is the same."""
    whole = answer(make(), GREEDY)
    rank, freed, allowed = make(), Event(), Matcher.allowed
    monkeypatch.setattr(Matcher, "allowed", lambda *given: freed.wait(60) and allowed(*given))
    driver = EngineDriver(rank.engine)
    driver.add("late", prompt(20), GREEDY)
    driver.add("good", prompt(33), replace(GREEDY, grammar=None, max_tokens=30, stop_token_ids=frozenset()))
    rows = []
    while driver.engine.has_work:
        result = driver.engine.step()
        driver.take(result)
        if not freed.is_set():
            rows.append(result.work.sampled_tokens)
        if len(driver.tokens.get("good", ())) == 20:
            freed.set()
    assert rows[2:] == [1] * (len(rows) - 2), rows
    assert driver.tokens["late"] == whole
    assert driver.at_rest()


def test_a_grammar_whose_lexer_is_full_is_compiled_again(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier answers with it decide nothing. A grammar that is too large for a single answer ends it."""
    sampling = replace(SEEDED, grammar=regex("(.*a.{6}|.*b.{5}){1,9}", "").grammar, max_tokens=40)
    seeds = range(6)

    def ended() -> tuple[dict[str, list[int]], list[object]]:
        driver = EngineDriver(make(kv_blocks=400).engine)
        for seed in seeds:
            driver.add(f"{seed}", prompt(20), replace(sampling, seed=seed))
        driver.run()
        assert driver.at_rest()
        return driver.tokens, [driver.ends[f"{seed}"] for seed in seeds]

    expected = ended()
    monkeypatch.setattr(compiler, "_LIMITS", limits(lexer_states=300))  # one answer needs up to 120
    assert ended() == expected
    monkeypatch.setattr(compiler, "_LIMITS", limits(lexer_states=40))
    assert all(isinstance(each, InputError) and "too many states" in str(each) for each in ended()[1])


def limits(lexer_states: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=60_000,
        step_max_items=50_000,
        max_lexer_states=lexer_states,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
