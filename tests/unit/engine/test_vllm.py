"""What of vLLM's engine needs no vLLM: which blocks a step exports, what is refused. The rest: tests/vllm."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec
from tandem.errors import ConfigError
from tandem.kvcache.layout import KvPoolLayout, blocks_for
from tandem.vllm_engine import launch
from tandem.vllm_engine.exports import Export
from worker.rank import fingerprint_of_kv
from worker.roles import WorkerIdentity

BLOCK = 4
LAYOUT = KvPoolLayout(64, 2, 2, BLOCK, 8, "float32", joined=True)
PACKED = KvPoolLayout(64, 2, 2, BLOCK, 8, "float32", joined=True, packed=True)


@given(
    prompt=st.integers(1, 60),
    cached_blocks=st.integers(0, 15),
    first=st.integers(0, 15),
    chunks=st.lists(st.integers(1, 20), min_size=60, max_size=60),
    packed=st.booleans(),
)
def test_each_block_is_exported_once_and_in_order(
    prompt: int, cached_blocks: int, first: int, chunks: list[int], packed: bool
) -> None:
    layout = PACKED if packed else LAYOUT
    total = blocks_for(prompt, BLOCK)
    computed = min(cached_blocks * BLOCK, (prompt - 1) // BLOCK * BLOCK)  # the last token is always computed
    cached, export = computed // BLOCK, Export("request", prompt, first)
    blocks = list(range(100, 100 + total))
    ranges = []
    for chunk in chunks:
        count = min(chunk, prompt - computed)
        if count:
            ranges += export.ranges(computed, count, blocks, layout, frozenset())
            computed += count
    exported = [block for each in ranges for block in each.block_ids]
    assert exported == blocks[first:]
    assert all(each.first_block == each.block_ids[0] - 100 for each in ranges)
    assert [each.is_last for each in ranges] == [False] * (len(ranges) - 1) + [True] * bool(ranges)
    assert all(each.in_cache == (each.first_block < cached) for each in ranges)
    for each in ranges:
        assert each.last_block_tokens == (layout.last_tokens(prompt) if each.is_last else BLOCK)


def test_what_the_step_itself_writes_is_not_sent_before_it_is_computed() -> None:
    written, found = Export("a", 10, 0), Export("b", 10, 0)
    (cached, _) = written.ranges(8, 2, [1, 2, 3], LAYOUT, {2})
    assert not cached.in_cache
    (cached, _) = found.ranges(8, 2, [1, 2, 3], LAYOUT, {3})
    assert cached.in_cache


def test_a_packed_block_is_moved_whole() -> None:
    assert [LAYOUT.last_tokens(tokens) for tokens in (1, 4, 5)] == [1, 4, 1]
    assert [PACKED.last_tokens(tokens) for tokens in (1, 4, 5)] == [4, 4, 4]


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(launch, "version", none)
    with pytest.raises(ConfigError, match=r"engine.kind: expected vLLM .* got none: install tandem-serve\[vllm\]"):
        launch.check_version()


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"vllm": {"seed": 1}}, "vllm: expected none with kind tandem, got seed"),
        ({"kind": "vllm"}, "block_tokens: expected 32, 64 or 128 with kind vllm, got 16"),
        ({"kind": "vllm", "block_tokens": 32, "weights": "int8"}, "weights: expected none with kind vllm, got int8"),
        ({"kind": "vllm", "block_tokens": 32, "kv_dtype": "int8"}, "kv_dtype: expected auto or fp8 with kind vllm"),
        ({"kind": "vllm", "block_tokens": 32, "speculation": "lookup"}, "speculation: expected none with kind vllm"),
        ({"kind": "vllm", "block_tokens": 32, "longest_step_s": 1}, "longest_step_s: expected none with kind vllm"),
        ({"kind": "vllm", "block_tokens": 32, "device": "cuda"}, "device: expected cpu with kind vllm"),
    ],
)
def test_a_setting_of_the_other_engine_is_refused_by_name(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineSpec.model_validate(given_)


def test_vllms_own_settings_are_kept() -> None:
    flags = {"attention_backend": "CPU_ATTN", "hf_overrides": {"a": [1, None]}}
    spec = EngineSpec(kind="vllm", block_tokens=32, vllm=flags)
    assert EngineSpec.model_validate_json(spec.model_dump_json()) == spec


IMAGES = {"mm_processor_kwargs": {"size": {"longest_edge": 64}}}


def test_both_roles_read_images_alike() -> None:
    """Else a decode worker would compute other KV for an image, and often of another length."""
    engine = {"kind": "vllm", "block_tokens": 32}
    ModelSpec.model_validate({"source": "m", "engine": engine | {"vllm": IMAGES}})
    with pytest.raises(ValidationError, match=r"engine.vllm.mm_processor_kwargs: expected the same for both roles"):
        ModelSpec.model_validate({"source": "m", "engine": engine, "prefill": {"engine": {"vllm": IMAGES}}})


def test_only_workers_that_read_images_alike_exchange_kv() -> None:
    def fingerprint(**vllm: Any) -> str:
        engine = EngineSpec(kind="vllm", block_tokens=32, vllm=vllm)
        launch: Any = SimpleNamespace(engine=engine)
        identity = WorkerIdentity("w", 1, 1, "model", 32, bytes(32))
        return fingerprint_of_kv(launch, identity)

    assert fingerprint() == fingerprint(attention_backend="CPU_ATTN") == "model"
    assert fingerprint(**IMAGES) == fingerprint(**IMAGES) != "model"
    assert fingerprint(**IMAGES) != fingerprint(mm_processor_kwargs={"size": {"longest_edge": 32}})
