from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.checkpoint.model_config import ModelConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.model.decoder import Decoder
from tandem.model.parallel import TensorParallel
from tandem.model.weights import load_model
from tandem.testing.models import write_tiny_llama

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path, tp: TensorParallel | None = None) -> Decoder:
    return load_model(folder, ModelConfig.load(folder), tp or TensorParallel(), "cpu", torch.float32)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def own_token_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token attends to itself alone, yet q and k take part: enough to compare shards, without a cache."""
    group = q.shape[1] // v.shape[1]
    v, k = v.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    return (v * torch.tanh((q * k).sum(-1, keepdim=True))).reshape(q.shape[0], -1)


def logits(model: Decoder) -> Tensor:
    tokens = torch.tensor([1, 5, 319, 160, 161])
    with torch.inference_mode():
        return model.forward(tokens, torch.arange(5), torch.tensor([1, 4]), own_token_attend)


def sharded_logits(folder: Path, size: int) -> list[Tensor]:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank(number: int) -> Tensor:
        group = dist.ProcessGroupGloo(store, number, size, timedelta(seconds=20))
        return logits(load(folder, TensorParallel(number, size, group)))  # type: ignore[arg-type]

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [{}, {"tie": True}, {"vocab": 321}, {"attention_bias": True, "mlp_bias": True}])
def test_shards_together_give_the_logits_of_the_whole(shape: dict[str, Any], size: int, tmp_path: Path) -> None:
    """Four ranks of two KV heads replicate each; a vocabulary of 321 rows stays whole on every rank."""
    folder = write_tiny_llama(tmp_path, **shape)
    whole = logits(load(folder))

    for each in sharded_logits(folder, size):
        torch.testing.assert_close(each, whole, atol=1e-3, rtol=1e-4)


def test_sharded_files_with_an_index_are_the_same_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    whole = logits(load(folder))
    split_in_two(folder)
    assert torch.equal(logits(load(folder)), whole)


def split_in_two(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    rewrite(folder, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    assert logits(load(folder)).isfinite().all()


def test_a_width_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="tp: expected one of 1, 2, 4"):
        load(folder, TensorParallel(0, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), f"expected tensor {Q_PROJ} of shape [64, 64], found none"),
        (lambda t: t.update({Q_PROJ: torch.zeros(64, 32)}), f"{Q_PROJ}: expected shape [64, 64]"),
        (lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}), f"{Q_PROJ}: expected one of F64"),
        (lambda t: t[Q_PROJ].fill_(float("nan")), f"{Q_PROJ}: expected finite numbers"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}), "got also model.layers.2.mlp"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}), "got also model.layers.0"),
    ],
    ids=["missing", "shape", "dtype", "not a number", "another layer", "a bias"],
)
def test_a_wrong_tensor_is_named_with_its_file(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    folder = rewrite(write_tiny_llama(tmp_path), change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert message in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_saved_rotary_buffers_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, tie=True)
    whole = logits(load(folder))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(320, 64)}
    assert torch.equal(logits(load(rewrite(folder, lambda tensors: tensors.update(extra)))), whole)


@pytest.mark.parametrize("kept_bytes", [0, 7, 100, 5_000, 100_000])
def test_a_truncated_file_is_named(kept_bytes: int, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected an intact safetensors file"):
        load(tmp_path)


def test_a_folder_without_weights_says_what_it_expected(tmp_path: Path) -> None:
    (write_tiny_llama(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*index\.json, found neither"):
        load(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "weights.bin", 3])
def test_an_index_cannot_point_outside_its_folder(file: object, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: file}}))
    with pytest.raises(CheckpointError, match="expected a file in this folder"):
        load(folder)


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    split_in_two(folder)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: expected tensor model\.extra"):
        load(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: expected this file"):
        load(folder)
