"""A host tier beside the pool: what was evicted is found again instead of computed again, to the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.config.engine import EngineSpec
from tandem.engine.factory import Rank
from tandem.engine.host_pool import host_slots
from tandem.errors import InsufficientMemory
from tandem.kvcache.layout import KvPoolLayout
from tandem.request import SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.testing.engine import EngineDriver, make_request, single_rank
from tandem.testing.models import random_prompt
from tests.conftest import Reference

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
TIER = {"kv_blocks": 12, "max_step_tokens": 64, "host_kv_memory_bytes": 1 << 20}
PROMPTS = {str(seed): random_prompt(70, VOCAB, seed) for seed in range(6)}


class Copying:
    """Copies what is announced as cached at once, as a transfer agent may, and the rest when its last layer is done."""

    def __init__(self, layers: int = 2) -> None:
        self.source: Rank | None = None
        self.last_layer = layers - 1
        self.found: dict[int, Any] = {}
        self.later: list[ExportRange] = []
        self.cached_blocks = 0

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self.later = [each for each in ranges if not each.in_cache]
        for each in ranges:
            if each.in_cache:
                self.cached_blocks += len(each.block_ids)
                self._copy(each)

    def layer_done(self, layer: int) -> None:
        if layer == self.last_layer:
            for each in self.later:
                self._copy(each)

    def _copy(self, exported: ExportRange) -> None:
        assert self.source is not None
        for logical, block in enumerate(exported.block_ids, exported.first_block):
            self.found[logical] = self.source.pool.tensor[block].clone()


def answers(rank: Rank, prompts: dict[str, list[int]]) -> EngineDriver:
    driver = EngineDriver(rank.engine)
    for name, prompt in prompts.items():
        driver.add(name, prompt, GREEDY)
        driver.run()
    return driver


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_dtype": "int8", "batch_invariant": True}, {"kv_dtype": "fp8", "batch_invariant": True}],
    ids=["fp32", "int8 KV", "fp8 KV"],
)
def test_a_second_pass_over_more_prompts_than_the_pool_holds_finds_them_all(
    make: Callable[..., Rank], options: dict[str, Any]
) -> None:
    expected = answers(make(**options), PROMPTS).tokens
    small, rank = make(**TIER | options | {"host_kv_memory_bytes": 0}), make(**TIER | options)
    for each in (small, rank):
        assert answers(each, PROMPTS).tokens == expected
    assert sum(answers(small, PROMPTS).cached.values()) < 6 * 64
    again = answers(rank, PROMPTS)
    assert again.tokens == expected
    assert again.cached == dict.fromkeys(PROMPTS, 64)
    host = rank.engine.load().host
    assert host.blocks_in >= 6 * 4 - 12
    assert 0 < host.used < host.total
    assert again.at_rest()


def test_what_the_tier_gave_up_is_computed_again(make: Callable[..., Rank]) -> None:
    rank = make(**TIER | {"host_kv_memory_bytes": 4 * make().layout.block_bytes})
    expected = answers(make(), PROMPTS).tokens
    for _ in range(3):
        assert answers(rank, PROMPTS).tokens == expected
    assert rank.engine.load().host.total == rank.engine.load().host.used == 4


@pytest.mark.parametrize("use_prefix_cache", [True, False])
def test_preempted_requests_come_back_from_the_tier_unless_they_may_not(
    make: Callable[..., Rank], reference: Reference, use_prefix_cache: bool
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    prompts = {str(seed): random_prompt(30, VOCAB, seed) for seed in range(6)}
    driver = EngineDriver(make(**TIER).engine)
    for name, tokens in prompts.items():
        driver.add(name, tokens, sampling, use_prefix_cache=use_prefix_cache)
    computed = 0
    while driver.engine.has_work:
        result = driver.engine.step()
        computed += result.work.prefill_tokens + result.work.decode_tokens
        driver.take(result)
    assert driver.tokens == {name: reference.answer(tokens, sampling) for name, tokens in prompts.items()}
    assert driver.engine.preemptions > 0
    again = computed - 6 * (30 + 40 - 1)
    assert (again <= 16 * driver.engine.preemptions) is use_prefix_cache  # the last block, which was not full
    assert driver.at_rest()


def test_a_prefix_that_came_back_is_exported_in_the_same_step(make: Callable[..., Rank], reference: Reference) -> None:
    exporter, to = Copying(), make()
    source = exporter.source = make(exporter=exporter, **TIER)
    sender = answers(source, PROMPTS)
    before = source.engine.load().host.blocks_in
    sender.tokens.clear()
    sender.add("0", PROMPTS["0"], GREEDY, export_from_block=0)
    sender.take(sender.engine.step())
    assert source.engine.load().host.blocks_in == before + 4
    assert exporter.cached_blocks == 4
    sender.engine.release_export("0")

    receiver = EngineDriver(to.engine)
    reserved = to.engine.reserve(make_request("0", PROMPTS["0"], GREEDY))
    for logical, block in enumerate(reserved.block_ids):
        to.pool.tensor[block] = exporter.found[logical]
    receiver.engine.join("0", sender.tokens["0"][0])
    receiver.run()
    assert [*sender.tokens["0"], *receiver.tokens["0"]] == reference.answer(PROMPTS["0"], GREEDY)
    assert sender.at_rest()
    assert receiver.at_rest()


@pytest.mark.parametrize("cancelled", [False, True])
def test_blocks_that_make_room_for_an_import_are_kept_before_it_is_written(
    make: Callable[..., Rank], reference: Reference, cancelled: bool
) -> None:
    rank = make(**TIER)
    driver = answers(rank, PROMPTS)
    new = random_prompt(150, VOCAB, 99)
    filled = rank.engine.reserve(make_request("new", new, GREEDY))
    rank.pool.tensor[list(filled.block_ids)] = 1e9  # at once, as a transfer agent may
    if cancelled:
        rank.engine.cancel("new")
    else:
        rank.engine.join("new", 7)
        driver.run()
    driver = answers(rank, PROMPTS)
    assert driver.tokens == {name: reference.answer(prompt, GREEDY) for name, prompt in PROMPTS.items()}
    assert driver.cached == dict.fromkeys(PROMPTS, 64)
    assert driver.at_rest()


def test_an_import_after_a_prefix_from_the_tier_decodes_to_the_same_tokens(
    make: Callable[..., Rank], reference: Reference
) -> None:
    exporter, rank = Copying(), make(**TIER)
    source = exporter.source = make(exporter=exporter)
    driver = answers(rank, PROMPTS)
    prompt = PROMPTS["0"] + random_prompt(60, VOCAB, 50)
    sender = EngineDriver(source.engine)
    sender.add("r", prompt, GREEDY, export_from_block=4)
    sender.run()
    reservation = rank.engine.reserve(make_request("r", prompt, GREEDY))
    assert reservation.first_missing_block == 4
    for logical in range(4, len(reservation.block_ids)):
        rank.pool.tensor[reservation.block_ids[logical]] = exporter.found[logical]
    driver.tokens.clear()
    rank.engine.join("r", sender.tokens["r"][0])
    driver.run()
    assert [*sender.tokens["r"], *driver.tokens["r"]] == reference.answer(prompt, GREEDY)
    assert driver.at_rest()


def test_routers_are_told_of_removal_only_when_nothing_can_be_had(make: Callable[..., Rank]) -> None:
    rank = make(**TIER)
    answers(rank, PROMPTS)
    events = rank.engine.take_cache_events()
    assert all(event.stored for event in events)
    assert rank.engine.load().host.used > 0


LAYOUT = KvPoolLayout(num_blocks=8, layers=2, kv_heads=2, block_tokens=16, head_dim=8, dtype="float32")


def test_a_tier_has_as_many_slots_as_its_memory_holds() -> None:
    assert host_slots(EngineSpec(), LAYOUT) == 0
    assert host_slots(EngineSpec(host_kv_memory_bytes=3 * LAYOUT.block_bytes + 1), LAYOUT) == 3


@pytest.mark.parametrize(
    ("wanted", "said"), [(LAYOUT.block_bytes - 1, "0 or at least 4096"), (1 << 60, "with the KV pool on the CPU")]
)
def test_a_tier_that_cannot_be_is_refused_by_its_field(wanted: int, said: str) -> None:
    with pytest.raises(InsufficientMemory, match=said) as refused:
        host_slots(EngineSpec(host_kv_memory_bytes=wanted), LAYOUT)
    assert refused.value.field == "engine.host_kv_memory_bytes"


def test_a_rank_without_the_memory_does_not_start(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InsufficientMemory, match="host_kv_memory_bytes"):
        single_rank(model_dir, tmp_path / "r", host_kv_memory_bytes=1 << 60)
