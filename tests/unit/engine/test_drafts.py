"""Tokens that the ranks draft in a step change how many steps an answer takes, and nothing of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.engine import EngineSpec
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.factory import Rank
from tandem.engine.loop.flight import Flight
from tandem.engine.step import Drafted
from tandem.errors import CheckpointError, ConfigError
from tandem.grammar.constraint import regex
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, Exported, answer_that_moves, make_request, single_rank
from tandem.testing.models import random_prompt, write_tiny_eagle, write_tiny_llama
from tests.conftest import Reference

VOCAB, HIDDEN, EOS = 300, 64, 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=4, max_tokens=24)
KINDS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalised": replace(SEEDED, frequency_penalty=0.9, repetition_penalty=1.2),
    "scored": replace(SEEDED, logprobs=2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "at ease": {},
    "preempted": {"kv_blocks": 16},
    "with a small budget": {"max_step_tokens": 16},
    "with a host tier": {"kv_blocks": 24, "host_kv_memory_bytes": 1 << 20},
    "in int8": {"kv_dtype": "int8"},
}
USUAL = ("at ease", "preempted")
Speculates = dict[str, Any]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Speculates]:
    folder = tmp_path_factory.mktemp("parts")
    other = write_tiny_llama(folder / "other", vocab=VOCAB, seed=2, hidden=48, layers=1, heads=3, kv_heads=1)
    exit_folder = write_exit(folder / "exit", layer=1)
    kinds: dict[str, Speculates] = {
        "the model itself": {"speculation": "draft", "speculation_model": str(model_dir)},
        "the model itself in int8": {"speculation": "draft", "speculation_weights": "int8"},
        "another model": {"speculation": "draft", "speculation_model": str(other)},
        "first layer": {"speculation": "early_exit", "speculation_layers": 1},
        "first layer with a head": {"speculation": "early_exit", "speculation_model": str(exit_folder)},
        "medusa": {"speculation": "medusa", "speculation_model": str(write_medusa(folder / "medusa", shared=False))},
        "medusa's trees": {
            "speculation": "medusa",
            "speculation_model": str(folder / "medusa"),
            "speculation_branches": 4,
        },
        "eagle3": {"speculation": "eagle3", "speculation_model": str(write_tiny_eagle(folder / "eagle3", model_dir))},
        "lookahead": {"speculation": "lookahead"},
    }
    return {name: kind | {"speculation_adaptive": False} for name, kind in kinds.items()}


NAMES = (
    "the model itself",
    "the model itself in int8",
    "another model",
    "first layer",
    "first layer with a head",
    "medusa",
    "medusa's trees",
    "eagle3",
    "lookahead",
)


def write_medusa(folder: Path, *, shared: bool, heads: int = 3, **config: Any) -> Path:
    """Random heads in the published format, or ones that do nothing but share a projection of few tokens."""
    torch.manual_seed(3)
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN) if shared else torch.randn(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        if not shared:
            tensors[f"{head}.1.weight"] = torch.randn(VOCAB, HIDDEN)
    return write_parts(folder, "medusa_lm_head", tensors, {"medusa_num_heads": heads} | config)


def write_exit(folder: Path, layer: int, **config: Any) -> Path:
    torch.manual_seed(4)
    tensors = {
        "norm.weight": torch.ones(HIDDEN),
        "linear.weight": 0.1 * torch.randn(HIDDEN, HIDDEN),
        "lm_head.weight": torch.randn(50, HIDDEN),
    }
    return write_parts(folder, "early_exit", tensors, {"exit_layer": layer, "vocabulary": [*range(50)]} | config)


def write_parts(folder: Path, name: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


def run(driver: EngineDriver) -> dict[str, list[int]]:
    for name, sampling in KINDS.items():
        for length in (1, 16, 17, 30, 100):
            driver.add(f"{name} {length}", prompt(length, length), replace(sampling, seed=length))
    driver.run()
    assert driver.at_rest()
    assert set(driver.ends.values()) == {FinishReason.LENGTH}
    return driver.tokens


@pytest.mark.parametrize(
    "options",
    [pytest.param(OPTIONS[name], id=name, marks=[] if name in USUAL else pytest.mark.slow) for name in OPTIONS],
)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_with_whatever_is_drafted(
    make: Callable[..., Rank], drafting: dict[str, Speculates], name: str, options: dict[str, Any]
) -> None:
    """All kinds of requests in one batch."""
    kept = {key: value for key, value in options.items() if key == "kv_dtype"}
    expected = run(EngineDriver(make(batch_invariant=True, **kept).engine))
    settings = drafting[name] | options
    if "speculation_branches" in settings and "max_step_tokens" in settings:
        settings["speculation_tokens"] = 2  # a tree of 15 tokens
    driver = EngineDriver(make(batch_invariant=True, **settings).engine)
    assert run(driver) == expected
    speculator = driver.engine.speculator
    assert speculator is not None
    assert speculator.proposed > 10
    assert options.get("kv_blocks") != 16 or driver.engine.preemptions > 0


@pytest.mark.parametrize("name", NAMES)
def test_grammars_and_stop_tokens_hold_for_drafts_of_any_length(
    tmp_path: Path, drafting: dict[str, Speculates], name: str
) -> None:
    """As many as pay are drafted, none where a grammar forces the next token."""
    model = write_tiny_llama(tmp_path / "model", vocab=VOCAB, seed=1, eos_token_id=EOS)
    digits = replace(SEEDED, grammar=regex("[0-9]{20,30}", "").grammar, stop_token_ids=frozenset({EOS}), max_tokens=80)
    requests = {"digits": digits, "greedy digits": replace(digits, temperature=0.0), "free": GREEDY}

    def answers(driver: EngineDriver, **more: SamplingParams) -> dict[str, list[int]]:
        for kind, sampling in (requests | more).items():
            driver.add(kind, prompt(30), sampling)
        driver.run()
        assert driver.at_rest()
        return driver.tokens

    expected = answers(EngineDriver(single_rank(model, tmp_path / "a", batch_invariant=True).engine))
    stop = expected["free"][12]
    stopped = replace(GREEDY, stop_token_ids=frozenset({stop}))
    rank = single_rank(model, tmp_path / "b", batch_invariant=True, **drafting[name] | {"speculation_adaptive": True})
    driver = EngineDriver(rank.engine)
    found = answers(driver, stopped=stopped)
    assert found.pop("stopped") == expected["free"][: expected["free"].index(stop) + 1]
    assert found == expected
    assert driver.ends["stopped"] is driver.ends["digits"] is FinishReason.STOP
    assert driver.engine.speculator is not None
    assert driver.engine.speculator.proposed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_as_many_drafts_are_right_after_a_handoff_as_without_one(
    make: Callable[..., Rank], drafting: dict[str, Speculates], name: str
) -> None:
    """Within 1 %: what a drafter needs of the prompt is there again."""
    requests = [make_request(f"r{n}", prompt(40 + n, n), replace(GREEDY, max_tokens=200)) for n in range(12)]
    whole = EngineDriver(make(kv_blocks=512, **drafting[name]).engine)
    exported = Exported()
    source, target = make(exporter=exported, **drafting[name]), make(**drafting[name])
    drivers = EngineDriver(source.engine), EngineDriver(target.engine)
    for request in requests:
        whole.engine.add(request)
        whole.run()
        exported.ranges.clear()
        assert answer_that_moves(source, exported, drivers, target, request, 1) == whole.tokens[request.request_id]
    counts = [driver.engine.speculator for driver in (whole, drivers[1])]
    alone, after = (each.accepted / each.proposed for each in counts if each is not None)
    print(f"{name}: {alone:.4f} without a handoff, {after:.4f} after one")
    assert after == pytest.approx(alone, abs=0.01)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_a_draft_model_that_is_the_model_is_always_right(
    make: Callable[..., Rank], drafting: dict[str, Speculates], kind: str
) -> None:
    """Also where tokens are drawn, because the draft draws with the same noise."""
    driver = EngineDriver(make(**drafting["the model itself"], speculation_tokens=4).engine)
    driver.add("r", prompt(40), KINDS[kind])
    steps = 0
    while driver.engine.has_work:
        driver.take(driver.engine.step())
        steps += 1
    speculator = driver.engine.speculator
    assert speculator is not None
    assert speculator.accepted == speculator.proposed > 0
    assert steps <= 7  # a prompt and 23 tokens by five


def test_a_draft_model_catches_up_with_a_long_prompt_over_several_steps(
    make: Callable[..., Rank], drafting: dict[str, Speculates]
) -> None:
    driver = EngineDriver(make(**drafting["the model itself"]).engine)
    for number in range(3):
        driver.add(str(number), prompt(400, number), GREEDY)
    driver.run()
    speculator = driver.engine.speculator
    assert speculator is not None
    assert speculator.accepted == speculator.proposed > 40


@pytest.mark.parametrize(
    "name",
    [
        "another model",
        *(pytest.param(e, marks=pytest.mark.slow) for e in ("the model itself", "first layer", "medusa")),
    ],
)
def test_a_device_drafts_beside_steps_that_it_recorded(
    model_dir: Path, tmp_path: Path, drafting: dict[str, Speculates], name: str
) -> None:
    """The path of a GPU, with attention in torch: it draws on the device, and records steps without drafts."""
    paged = PagedPath(plain_attention, EagerRecorder())
    expected = run(EngineDriver(single_rank(model_dir, tmp_path / "a", paged=paged).engine))
    driver = EngineDriver(single_rank(model_dir, tmp_path / "b", None, paged, **drafting[name]).engine)
    assert run(driver) == expected
    assert driver.engine.speculator is not None
    assert driver.engine.speculator.proposed > 10


def test_heads_get_the_hidden_state_that_chose_the_last_token(make: Callable[..., Rank], tmp_path: Path) -> None:
    """Heads that change nothing choose that token again, with the model's own projection."""
    folder = write_medusa(tmp_path / "heads", shared=True)
    rank = make(speculation="medusa", speculation_model=str(folder), speculation_adaptive=False)
    driver, seen = EngineDriver(rank.engine), list[tuple[int, tuple[int, ...]]]()
    taken = driver.engine._launcher._take_drafted

    def take(flight: Flight, drafted: list[Drafted]) -> None:
        seen.extend(
            (chunk.sequence.tokens[-1], found.tokens) for chunk, found in zip(flight.plan.chunks, drafted, strict=True)
        )
        taken(flight, drafted)

    driver.engine._launcher._take_drafted = take  # type: ignore[method-assign]
    for length in (3, 40, 70):
        driver.add(str(length), prompt(length), GREEDY)
    driver.run()
    drafted = [(last, tokens) for last, tokens in seen if tokens]
    assert len(drafted) > 30
    assert all(set(tokens) == {last} for last, tokens in drafted)


def test_a_drafter_that_fails_ends_no_answer(
    make: Callable[..., Rank], drafting: dict[str, Speculates], caplog: pytest.LogCaptureFixture
) -> None:
    expected = EngineDriver(make().engine)
    rank = make(**drafting["first layer"])
    driver = EngineDriver(rank.engine)
    assert rank.runner.drafter is not None

    def fails(_: object) -> list[Drafted]:
        raise ValueError("no")

    rank.runner.drafter.draft = fails  # type: ignore[method-assign, assignment]
    for each in (expected, driver):
        each.add("r", prompt(30), GREEDY)
        each.run()
    assert driver.tokens == expected.tokens
    assert driver.at_rest()
    assert "runs without" in caplog.text


def some(every: Iterable[Any], usual: Container[Any]) -> list[Any]:
    """Of `every` those that are not `usual` are slow tests."""
    return [pytest.param(each, marks=[] if each in usual else pytest.mark.slow) for each in every]


@pytest.mark.parametrize("kind", some(KINDS, ("greedy", "penalised")))
@pytest.mark.parametrize("name", some(NAMES, ("the model itself", "first layer", "medusa's trees")))
@pytest.mark.parametrize("after", some(range(1, 24), (1, 2, 11, 17)))
def test_an_answer_that_moves_after_any_token_goes_on_the_same(
    make: Callable[..., Rank], reference: Reference, drafting: dict[str, Speculates], name: str, kind: str, after: int
) -> None:
    expected, exported = reference.answer(prompt(20), KINDS[kind]), Exported()
    source, target = make(exporter=exported, **drafting[name]), make(**drafting[name])
    drivers = EngineDriver(source.engine), EngineDriver(target.engine)
    request = make_request("r", prompt(20), KINDS[kind])
    assert answer_that_moves(source, exported, drivers, target, request, after) == expected
    assert all(driver.at_rest() for driver in drivers)


@pytest.mark.parametrize("cancelled_after", range(1, 9))
def test_cancelling_frees_everything(
    make: Callable[..., Rank], drafting: dict[str, Speculates], cancelled_after: int
) -> None:
    driver = EngineDriver(make(**drafting["another model"], max_step_tokens=16).engine)
    driver.add("r", prompt(60), GREEDY)
    for _ in range(cancelled_after):
        driver.take(driver.engine.step())
    driver.engine.cancel("r")
    assert driver.at_rest()


def bad_parts(folder: Path) -> Iterator[tuple[Speculates, type[Exception], str]]:
    heads, layer = {"speculation": "medusa"}, {"speculation": "early_exit"}
    wide = write_parts(
        folder / "wide",
        "medusa_lm_head",
        {"0.0.linear.weight": torch.zeros(9, 9), "0.0.linear.bias": torch.zeros(9)},
        {"medusa_num_heads": 1},
    )
    yield heads | {"speculation_model": str(wide)}, CheckpointError, "expected shape"
    many = write_medusa(folder / "many", shared=True, heads=1, medusa_num_heads=2)
    yield heads | {"speculation_model": str(many)}, CheckpointError, "expected tensor 1.0.linear.weight"
    few = write_medusa(folder / "few", shared=True, heads=2, medusa_num_heads=1)
    yield heads | {"speculation_model": str(few)}, CheckpointError, "got also 1.0.linear"
    eagle, tiny = {"speculation": "eagle3"}, write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1)
    for fields, said in (
        ({"num_key_value_heads": 4}, "num_key_value_heads: expected 2, as the model's"),
        ({"norm_output": True}, "norm_output: expected false"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 1]}, "expected 3 layers from 1 to 1"),
        ({"draft_vocab_size": 99}, "d2t: expected 99 integers"),
    ):
        head = write_tiny_eagle(folder / said[:6], tiny, **fields)
        yield eagle | {"speculation_model": str(head)}, CheckpointError, said
    other = write_exit(folder / "other", layer=2)
    yield layer | {"speculation_model": str(other), "speculation_layers": 1}, CheckpointError, "exit_layer: expected 1"
    ids = write_exit(folder / "ids", layer=1, vocabulary=[VOCAB] * 50)
    yield layer | {"speculation_model": str(ids)}, CheckpointError, "vocabulary: expected different token ids"
    yield layer | {"speculation_layers": 2}, ConfigError, "expected fewer than the model's 2 layers"
    words = write_tiny_llama(folder / "words", vocab=VOCAB + 1, seed=5)
    yield {"speculation": "draft", "speculation_model": str(words)}, ConfigError, "the model's vocabulary"
    fp8 = {"speculation": "draft", "speculation_weights": "fp8"}
    yield fp8, ConfigError, "engine.speculation_weights: the draft model cannot have these"
    yield {"speculation": "draft", "speculation_model": "no/such-model"}, ConfigError, "tandem pull"


def test_parts_of_another_model_are_refused(make: Callable[..., Rank], tmp_path: Path) -> None:
    for options, error, said in bad_parts(tmp_path):
        with pytest.raises(error, match=said):
            make(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculation": "draft"}, "speculation_model"),
        ({"speculation_adaptive": False}, "speculation_adaptive"),
        ({"speculation": "early_exit"}, "speculation_layers"),
        ({"speculation": "draft", "speculation_weights": "int8", "weights": "int8"}, "another format"),
        ({"speculation": "medusa", "speculation_model": "a", "speculation_weights": "int8"}, "speculation_weights"),
        ({"speculation": "lookup", "speculation_model": "a"}, "speculation_model"),
        ({"speculation": "medusa", "speculation_model": "a", "speculation_layers": 3}, "speculation_layers"),
        ({"speculation": "eagle3", "speculation_model": "a", "speculation_branches": 1}, "speculation_branches: exp"),
        (
            {"speculation": "medusa", "speculation_model": "a", "speculation_branches": 3, "max_step_tokens": 35},
            "a tree of at most max_step_tokens .35., got 36",
        ),
    ],
)
def test_what_a_proposer_needs_and_does_not_take(options: Speculates, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineSpec.model_validate(options)


def test_an_eagle_head_with_the_models_embedding_is_read(
    make: Callable[..., Rank], model_dir: Path, tmp_path: Path
) -> None:
    """As published heads often have it."""
    head = write_tiny_eagle(tmp_path / "head", model_dir)
    with_embedding = load_file(head / "model.safetensors") | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    save_file(with_embedding, head / "model.safetensors")
    assert make(speculation="eagle3", speculation_model=str(head)).engine.proposer == "eagle3"
