"""One engine's tokens are the reference's however the work is cut, and its blocks are always accounted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.engine.factory import Rank
from tandem.engine.runner import layers_to_report
from tandem.errors import ContextExceeded, InputError, KvExhausted
from tandem.kvcache.layout import KvPoolLayout
from tandem.request import FinishReason, SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.testing.engine import EngineDriver, make_request
from tandem.testing.models import random_prompt
from tests.conftest import Reference

VOCAB = 300
LENGTHS = (1, 15, 16, 17, 100)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=4, max_tokens=8)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("max_step_tokens", [16, 64, 512])
def test_tokens_equal_the_reference_alone_and_in_batches(
    make: Callable[..., Rank], reference: Reference, sampling: SamplingParams, max_step_tokens: int
) -> None:
    driver = EngineDriver(make(max_step_tokens=max_step_tokens).engine)
    expected = {str(n): reference.answer(prompt(n), sampling) for n in LENGTHS}
    for length in LENGTHS:
        driver.add(str(length), prompt(length), sampling)
    driver.run()
    assert driver.tokens == expected
    driver.tokens.clear()
    for length in LENGTHS:
        driver.add(str(length), prompt(length), sampling)
        driver.run()
    assert driver.tokens == expected
    assert driver.cached == {"1": 0, "15": 0, "16": 0, "17": 16, "100": 96}
    assert driver.at_rest()


@pytest.mark.parametrize(("longest_step_s", "least", "most"), [(1e-6, 16, 16), (60.0, 300, 512)])
def test_prompts_beside_answers_are_cut_to_what_a_steps_time_allows(
    make: Callable[..., Rank], reference: Reference, longest_step_s: float, least: int, most: int
) -> None:
    driver = EngineDriver(make(max_step_tokens=512, longest_step_s=longest_step_s).engine)
    answering = replace(GREEDY, max_tokens=60)
    driver.add("answers", prompt(30), answering)
    driver.take(driver.engine.step())
    for number in range(3):
        driver.add(str(number), prompt(500, number), GREEDY)
    chunks = []
    while driver.engine.load().waiting_tokens:
        result = driver.engine.step()
        driver.take(result)
        if result.work.decode_tokens:
            chunks.append(result.work.prefill_tokens)
    assert least <= max(chunks[3:]) <= most
    driver.run()
    assert driver.tokens["answers"] == reference.answer(prompt(30), answering)
    for number in range(3):
        assert driver.tokens[str(number)] == reference.answer(prompt(500, number), GREEDY)
    assert driver.at_rest()


@pytest.mark.parametrize("max_step_tokens", [64, 512])
def test_a_prompt_of_many_blocks_equals_the_reference(
    make: Callable[..., Rank], reference: Reference, max_step_tokens: int
) -> None:
    driver = EngineDriver(make(max_step_tokens=max_step_tokens).engine)
    for name in ("cold", "cached"):
        driver.add(name, prompt(1000), GREEDY)
        driver.run()
    assert driver.tokens["cold"] == driver.tokens["cached"] == reference.answer(prompt(1000), GREEDY)
    assert driver.cached == {"cold": 0, "cached": 992}
    assert driver.at_rest()


def test_steps_say_what_they_computed(make: Callable[..., Rank]) -> None:
    engine = make(max_step_tokens=64).engine
    engine.add(make_request("a", prompt(100), GREEDY))
    steps = []
    while engine.has_work:
        steps.append(engine.step().work)
    first, second, *later = steps
    assert (first.prefill_tokens, first.decode_tokens, first.sampled_tokens) == (64, 0, 0)
    assert (first.attended_tokens, first.kv_tokens) == (64 * 65 // 2, 64)
    assert (second.prefill_tokens, second.sampled_tokens, second.kv_tokens) == (36, 1, 100)
    assert second.attended_tokens == 36 * 64 + 36 * 37 // 2
    assert [(each.decode_tokens, each.attended_tokens) for each in later] == [(1, 100 + n) for n in range(1, 8)]
    assert engine.preemptions == 0


def test_preempted_requests_are_computed_again_to_the_same_tokens(
    make: Callable[..., Rank], reference: Reference
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    driver = EngineDriver(make(kv_blocks=12, max_step_tokens=64).engine)
    prompts = {str(seed): prompt(30, seed) for seed in range(6)}
    for name, tokens in prompts.items():
        driver.add(name, tokens, sampling)
    driver.run()
    assert driver.tokens == {name: reference.answer(tokens, sampling) for name, tokens in prompts.items()}
    assert driver.engine.preemptions > 0
    assert driver.at_rest()


def test_a_request_that_outgrows_the_pool_alone_fails_typed(make: Callable[..., Rank]) -> None:
    driver = EngineDriver(make(kv_blocks=8).engine)
    driver.add("big", prompt(100), SamplingParams(temperature=0.0, max_tokens=500))
    driver.add("small", prompt(10), GREEDY)
    driver.run()
    assert isinstance(driver.ends["big"], KvExhausted)
    assert driver.ends["small"] is FinishReason.LENGTH
    assert driver.at_rest()


@pytest.mark.parametrize("broken_at", [1, 4, 11])
def test_penalties_count_the_same_tokens_when_an_answer_goes_on_elsewhere(
    make: Callable[..., Rank], reference: Reference, broken_at: int
) -> None:
    few = ((3, 12.0), (4, 12.0), (5, 12.0))  # so that tokens come back
    penalties: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=12, logit_bias=few, **penalties)
    expected = reference.answer(prompt(40), sampling)
    assert expected != reference.answer(prompt(40), replace(sampling, frequency_penalty=0.0, presence_penalty=0.0))
    driver = EngineDriver(make().engine)
    driver.add("whole", prompt(40), sampling)
    given, rest = expected[:broken_at], replace(sampling, max_tokens=12 - broken_at)
    driver.add("goes on", [*prompt(40), *given], rest, answered_tokens=broken_at)
    driver.run()
    assert driver.tokens == {"whole": expected, "goes on": expected[broken_at:]}


def test_an_imported_prompt_counts_its_first_token(make: Callable[..., Rank], reference: Reference) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, logit_bias=((7, 20.0),), frequency_penalty=2.0)
    expected = reference.answer(prompt(32), sampling)
    driver = EngineDriver(make().engine)
    driver.add("first", prompt(32), replace(sampling, max_tokens=1))
    driver.run()
    driver.engine.reserve(make_request("rest", prompt(32), sampling))
    driver.engine.join("rest", expected[0])
    driver.run()
    assert [*driver.tokens["first"], *driver.tokens["rest"]] == expected


@pytest.mark.parametrize(
    ("sampling", "answered", "field"),
    [
        (SamplingParams(logit_bias=((VOCAB, 1.0),)), 0, "logit_bias"),
        (SamplingParams(), 10, "answer_tokens"),
        (SamplingParams(), -1, "answer_tokens"),
    ],
)
def test_what_penalties_and_biases_cannot_mean_is_refused(
    make: Callable[..., Rank], sampling: SamplingParams, answered: int, field: str
) -> None:
    with pytest.raises(InputError) as refused:
        make().engine.add(make_request("r", prompt(10), sampling, answered_tokens=answered))
    assert refused.value.field == field


def test_a_stop_token_ends_the_answer_with_it(make: Callable[..., Rank], reference: Reference) -> None:
    third = reference.answer(prompt(20), GREEDY)[2]
    driver = EngineDriver(make().engine)
    driver.add("r", prompt(20), SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=frozenset({third})))
    driver.run()
    assert driver.tokens["r"][-1] == third
    assert driver.ends["r"] is FinishReason.STOP


def test_cancelling_at_any_step_frees_everything(make: Callable[..., Rank]) -> None:
    driver = EngineDriver(make(max_step_tokens=16).engine)
    for steps in range(12):
        driver.add("r", prompt(100, steps), GREEDY)
        for _ in range(steps):
            driver.take(driver.engine.step())
        assert driver.engine.cancel("r")
        assert not driver.engine.cancel("r")
        assert driver.at_rest()


def test_what_cannot_run_is_refused_at_once(make: Callable[..., Rank]) -> None:
    engine = make(kv_blocks=8).engine
    with pytest.raises(InputError, match="299"):
        engine.add(make_request("r", [VOCAB], GREEDY))
    with pytest.raises(InputError, match="at least one token"):
        engine.add(make_request("r", [], GREEDY))
    with pytest.raises(ContextExceeded, match="2048"):
        engine.add(make_request("r", prompt(2048), GREEDY))
    with pytest.raises(ContextExceeded, match="128 tokens"):
        engine.add(make_request("r", prompt(200), GREEDY))
    assert not engine.has_work


class CopyExporter:
    """Stands in for the transfer: notes which block ranges were finished, in order."""

    def __init__(self) -> None:
        self.ranges: list[ExportRange] = []
        self.layers: list[int] = []

    def begin_step(self, ranges: Any) -> None:
        self.ranges.extend(ranges)

    def layer_done(self, layer: int) -> None:
        self.layers.append(layer)


@pytest.mark.parametrize("max_step_tokens", [16, 24, 512])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("cached_on", ["neither", "prefill", "decode", "both"])
def test_exported_blocks_decode_to_the_same_tokens_elsewhere(
    make: Callable[..., Rank], reference: Reference, length: int, cached_on: str, max_step_tokens: int
) -> None:
    exporter = CopyExporter()
    sender = make(exporter=exporter, max_step_tokens=max_step_tokens)
    receiver = make()
    p, d = EngineDriver(sender.engine), EngineDriver(receiver.engine)
    if cached_on in ("prefill", "both"):
        p.add("warm", prompt(length), GREEDY)
        p.run()
    if cached_on in ("decode", "both"):
        d.add("warm", prompt(length), GREEDY)
        d.run()
    reservation = d.engine.reserve(make_request("r", prompt(length), GREEDY))
    p.add("r", prompt(length), GREEDY, export_from_block=reservation.first_missing_block)
    p.run()
    covered = [block for r in exporter.ranges for block in range(r.first_block, r.first_block + len(r.block_ids))]
    assert covered == list(range(reservation.first_missing_block, len(reservation.block_ids)))
    for copied in exporter.ranges:
        for logical, block in enumerate(copied.block_ids, copied.first_block):
            receiver.pool.tensor[reservation.block_ids[logical]] = sender.pool.tensor[block]
    if exporter.ranges:
        assert exporter.ranges[-1].is_last
        assert exporter.ranges[-1].last_block_tokens == (length % 16 or 16)
    assert p.engine.load().blocks.leased > 0
    p.engine.release_export("r")
    (first,) = p.tokens["r"]
    d.engine.join("r", first)
    d.run()
    assert [first, *d.tokens["r"]] == reference.answer(prompt(length), GREEDY)
    assert p.at_rest()
    assert d.at_rest()


@pytest.mark.parametrize(("told_bytes", "told"), [(1, [0, 1]), (1 << 20, [1])])
def test_layers_are_told_of_once_enough_was_written_and_at_the_end(
    make: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, told_bytes: int, told: list[int]
) -> None:
    monkeypatch.setattr("tandem.engine.runner.REPORT_BYTES", told_bytes)
    exporter = CopyExporter()
    sender = make(exporter=exporter)
    driver = EngineDriver(sender.engine)
    driver.add("r", prompt(40), GREEDY, export_from_block=0)
    driver.run()
    assert exporter.layers == told
    driver.add("cached", prompt(33), GREEDY, export_from_block=0)
    driver.run()
    assert len(exporter.layers) == 2 * len(told)  # its last block was computed
    driver.engine.release_export("r")
    driver.engine.release_export("cached")
    assert driver.at_rest()


@pytest.mark.parametrize(
    ("layers", "blocks", "told"),
    [(8, 1, {3, 7}), (6, 1, {3, 5}), (2, 1, {1}), (8, 3, {1, 3, 5, 7}), (8, 4, set(range(8))), (8, 99, set(range(8)))],
)
def test_the_more_blocks_the_more_often_layers_are_told_of(layers: int, blocks: int, told: set[int]) -> None:
    layout = KvPoolLayout(128, layers, 4, 16, 512, "float32")  # a quarter of a MiB for a block and layer
    export = ExportRange("r", 0, tuple(range(blocks)), 16, in_cache=False, is_last=True)
    cached = replace(export, block_ids=tuple(range(100, 120)), in_cache=True)
    assert layers_to_report([cached, export], layout) == told
    assert layers_to_report([cached], layout) == set()


def test_an_exported_answer_that_ends_at_its_first_token_says_so(
    make: Callable[..., Rank], reference: Reference
) -> None:
    (first,) = reference.answer(prompt(20), SamplingParams(temperature=0.0, max_tokens=1))
    driver = EngineDriver(make().engine)
    stopping = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=frozenset({first}))
    driver.add("stop", prompt(20), stopping, export_from_block=0)
    driver.add("length", prompt(20), SamplingParams(temperature=0.0, max_tokens=1), export_from_block=0)
    driver.add("more", prompt(20), GREEDY, export_from_block=0)
    driver.run()
    assert driver.ends == {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "more": None}
    for name in driver.ends:
        assert driver.tokens[name] == [first]
        driver.engine.release_export(name)
    assert driver.at_rest()


def test_a_seeded_answer_goes_on_the_same_from_any_place(make: Callable[..., Rank], reference: Reference) -> None:
    """As after a migration: the prompt and what was said so far are the new prompt."""
    whole = reference.answer(prompt(20), SEEDED)
    driver = EngineDriver(make().engine)
    for said in (1, 3, 7):
        rest = replace(SEEDED, max_tokens=SEEDED.max_tokens - said)
        driver.add(str(said), [*prompt(20), *whole[:said]], rest)
    driver.run()
    assert driver.tokens == {str(said): whole[said:] for said in (1, 3, 7)}
    assert driver.at_rest()


def test_an_impossible_first_token_is_refused(make: Callable[..., Rank]) -> None:
    engine = make().engine
    engine.reserve(make_request("r", prompt(5), GREEDY))
    with pytest.raises(InputError, match="first_token"):
        engine.join("r", VOCAB)
    assert engine.cancel("r")
    assert engine.load().blocks.leased == 0


def test_a_reservation_without_room_changes_nothing(make: Callable[..., Rank]) -> None:
    engine = make(kv_blocks=8).engine
    engine.reserve(make_request("a", prompt(70), GREEDY))
    before = engine.load()
    with pytest.raises(KvExhausted):
        engine.reserve(make_request("b", prompt(70, 1), GREEDY))
    assert engine.load() == before
    assert engine.cancel("a")
    assert engine.load().blocks.free == 8


def test_logprobs_are_of_the_untempered_distribution(make: Callable[..., Rank]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=3, logprobs=4)
    engine = make().engine
    engine.add(make_request("r", prompt(20), sampling))
    tokens = [token for _ in range(3) for token in engine.step().tokens]
    for token in tokens:
        assert token.logprob is not None
        assert token.top[0].token_id == token.token_id
        assert token.top[0].logprob == token.logprob
        assert len(token.top) == 4
