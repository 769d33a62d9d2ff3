"""An adapter's files: what they hold, whether they fit, which content they are; and what a spec says of adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from cluster.spec.resolve import load_adapters
from tandem.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, adapter_fingerprint, copied_adapter
from tandem.checkpoint.model_config import ModelConfig
from tandem.config.model import AdapterSpec, ModelSpec, Role
from tandem.config.spec import ClusterSpec
from tandem.errors import CheckpointError, ConfigError
from tandem.testing.adapters import write_adapter
from tandem.testing.models import write_tiny_llama

ENGINE = {"kind": "vllm", "block_tokens": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("adapter") / "tiny")


def load(folder: Path, model: Path) -> Adapter:
    return Adapter.load(AdapterSpec(name="sql", source=str(folder)), ModelConfig.load(model))


def test_its_rank_is_that_of_its_matrices(tmp_path: Path, model: Path) -> None:
    adapter = load(write_adapter(tmp_path / "a", model, rank=6), model)
    assert (adapter.name, adapter.rank, adapter.folder) == ("sql", 6, tmp_path / "a")


def test_it_is_named_by_its_content(tmp_path: Path, model: Path) -> None:
    one, same, other = (
        load(write_adapter(tmp_path / name, model, seed=seed), model)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one.fingerprint == same.fingerprint == adapter_fingerprint(same.folder)
    assert one.fingerprint != other.fingerprint
    scaled = write_adapter(tmp_path / "scaled", model, seed=1, config={"lora_alpha": 3})
    assert load(scaled, model).fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, r"peft_type: expected LORA, got 'IA3'"),
        ({"bias": "all"}, r"bias: expected none, got 'all'"),
        ({"use_dora": True}, r"use_dora: expected none: only low-rank matrices are served, got True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: expected none.* got \['lm_head'\]"),
    ],
)
def test_what_is_not_served_is_refused_by_field(
    tmp_path: Path, model: Path, config: Mapping[str, Any], said: str
) -> None:
    folder = write_adapter(tmp_path / "a", model, config=config)
    with pytest.raises(CheckpointError, match=rf"^adapters: sql: .*adapter_config.json: {said}") as caught:
        load(folder, model)
    assert caught.value.field == "adapters"


def test_one_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    wide = write_tiny_llama(tmp_path / "wide", hidden=128, layers=3)
    folder = write_adapter(tmp_path / "a", wide, modules=("self_attn.q_proj",))
    with pytest.raises(CheckpointError, match=r"q_proj: expected matrices for 64 inputs and 64 outputs, as the model"):
        load(folder, model)
    deep = write_tiny_llama(tmp_path / "deep", layers=3)
    with pytest.raises(CheckpointError, match=r"layers\.2\..*: expected one of the model's 2 layers"):
        load(write_adapter(tmp_path / "b", deep), model)


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{MODULE}.lora_A.weight": (4, 64)}, "expected lora_A and lora_B of one rank"),
        ({f"{MODULE}.lora_A.weight": (4, 64), f"{MODULE}.lora_B.weight": (64, 5)}, "of one rank"),
        ({f"{MODULE}.weight": (64, 64)}, "expected matrices named"),
        ({f"{MODULE}.lora_A.weight": (4,)}, "expected matrices named"),
        *(
            (
                {f"base_model.model.{name}.lora_A.weight": (4, 64), f"base_model.model.{name}.lora_B.weight": (64, 4)},
                f"expected matrices of model.layers.N with .*, got {name}",
            )
            for name in (
                "lm_head",
                "model.layers.0.mlp.q_proj",
                "transformer.h.0.q_proj",
                "model.layers.x.self_attn.q_proj",
            )
        ),
        ({}, "expected matrices of at least one module"),
    ],
)
def test_weights_that_are_no_adapter_are_refused(
    tmp_path: Path, model: Path, tensors: Mapping[str, tuple[int, ...]], said: str
) -> None:
    folder = write_adapter(tmp_path / "a", model)
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=said):
        load(folder, model)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path, model: Path) -> None:
    folder = write_adapter(tmp_path / "a", model)
    whole = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: expected a safetensors file, got"):
        load(folder, model)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: expected this file, found none"):
        load(folder, model)
    (folder / CONFIG_FILE).write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match=r"adapter_config.json: expected a JSON object"):
        load(folder, model)
    with pytest.raises(CheckpointError, match=r"none/adapter_config.json: expected this file"):
        load(tmp_path / "none", model)


def spec_of(model: Path, *folders: Path, **engine: Any) -> ModelSpec:
    adapters = [{"name": folder.name, "source": str(folder)} for folder in folders]
    return ModelSpec.model_validate({"source": str(model), "engine": ENGINE | engine, "adapters": adapters})


def test_its_rank_must_fit_the_room_that_workers_make(tmp_path: Path, model: Path) -> None:
    folder = write_adapter(tmp_path / "sql", model, rank=17)
    config = ModelConfig.load(model)
    with pytest.raises(
        CheckpointError, match=r"^adapters: sql: expected a rank of at most 16, got 17: set engine.vllm"
    ):
        load_adapters(spec_of(model, folder), config)
    (adapter,) = load_adapters(spec_of(model, folder, vllm={"max_lora_rank": 32}), config)
    assert adapter.rank == 17


def test_adapters_need_an_engine_that_takes_them(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValidationError, match=r"adapters: expected none with engine.kind tandem: set it to vllm"):
        ModelSpec.model_validate({"adapters": [{"name": "sql", "source": "x"}]})
    folder = write_adapter(tmp_path / "sql", model)
    assert all(spec_of(model, folder).takes_adapters(role) for role in Role)
    assert all(spec_of(model, vllm={"enable_lora": True}).takes_adapters(role) for role in Role)
    assert not any(spec_of(model).takes_adapters(role) for role in Role)
    assert not any(ModelSpec().takes_adapters(role) for role in Role)


@pytest.mark.parametrize("names", [("sql", "sql"), ("tiny",)])
def test_names_of_models_and_adapters_differ(model: Path, names: tuple[str, ...]) -> None:
    adapters = [{"name": name, "source": "x"} for name in names]
    with pytest.raises(ValidationError, match="expected different names of models and adapters"):
        ClusterSpec.model_validate({"models": [{"source": str(model), "engine": ENGINE, "adapters": adapters}]})


@pytest.mark.parametrize(
    ("vllm", "said"),
    [
        ({"enable_lora": False}, "engine.vllm.enable_lora: expected true with adapters, got False"),
        ({"max_loras": "8"}, "engine.vllm.max_loras: expected an integer, got '8'"),
        ({"max_lora_rank": True}, "engine.vllm.max_lora_rank: expected an integer, got True"),
    ],
)
def test_settings_that_leave_no_room_for_adapters_are_refused(model: Path, vllm: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        spec_of(model, Path("/sql"), vllm=vllm)


@pytest.mark.parametrize("source", ["~nobody-has-this-name/sql", "a\0b"])
def test_a_source_that_is_no_path_is_named(model: Path, source: str) -> None:
    with pytest.raises(CheckpointError, match="adapters: sql: "):
        Adapter.load(AdapterSpec(name="sql", source=source), ModelConfig.load(model))


class TestCopies:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache" / "adapters"

    def test_a_copy_outlives_its_source(self, tmp_path: Path, model: Path, cache: Path) -> None:
        folder = write_adapter(tmp_path / "a", model)
        fingerprint = adapter_fingerprint(folder)
        copy = copied_adapter(folder, fingerprint)
        write_adapter(folder, model, seed=9)
        assert copied_adapter(folder, fingerprint) == copy == cache / fingerprint
        assert adapter_fingerprint(copy) == fingerprint
        shutil.rmtree(folder)
        assert copied_adapter(folder, fingerprint) == copy
        assert [each.name for each in cache.iterdir()] == [fingerprint]

    @pytest.mark.parametrize("broken", ["cut", "empty", "without_config"])
    def test_a_broken_copy_is_replaced(self, tmp_path: Path, model: Path, cache: Path, broken: str) -> None:
        """As a power failure leaves it."""
        folder = write_adapter(tmp_path / "a", model)
        fingerprint = adapter_fingerprint(folder)
        copy = copied_adapter(folder, fingerprint)
        weights, config = copy / WEIGHTS_FILE, copy / CONFIG_FILE
        match broken:
            case "cut":
                weights.write_bytes(weights.read_bytes()[:100])
            case "empty":
                weights.write_bytes(b"")
            case _:
                config.unlink()
        assert copied_adapter(folder, fingerprint) == copy
        assert adapter_fingerprint(copy) == fingerprint
        assert [each.name for each in cache.iterdir()] == [fingerprint]

    @pytest.mark.parametrize("fingerprint", ["", "..", "../../etc", "A" * 32])
    def test_a_fingerprint_is_no_path(self, tmp_path: Path, fingerprint: str) -> None:
        with pytest.raises(ConfigError, match="expected a fingerprint of 32 hex digits"):
            copied_adapter(tmp_path, fingerprint)

    def test_other_content_is_no_copy(self, tmp_path: Path, model: Path, cache: Path) -> None:
        folder = write_adapter(tmp_path / "a", model)
        fingerprint = adapter_fingerprint(folder)
        write_adapter(folder, model, seed=9)
        with pytest.raises(ConfigError, match="its files changed after they were checked"):
            copied_adapter(folder, fingerprint)
        shutil.rmtree(folder)
        with pytest.raises(ConfigError, match="cannot be copied to"):
            copied_adapter(folder, fingerprint)
        assert not [*cache.iterdir()]
