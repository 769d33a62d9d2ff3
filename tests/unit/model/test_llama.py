"""The model against `transformers`' own, on tiny random checkpoints, with a dense attention that anyone can check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_families import Activation
from tandem.model.ops import TORCH_OPS, TorchOps
from tandem.model.parallel import TensorParallel
from tandem.model.weights import load_model
from tandem.testing.models import write_tiny_llama

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "one KV head": {"kv_heads": 1},
    "as many KV heads as query heads": {"kv_heads": 4},
    "tied embeddings": {"tie": True},
    "linear RoPE scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 RoPE scaling": {"rope_scaling": ROPE_LLAMA3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads wider than hidden": {"head_dim": 32, "rope_theta": 500_000.0},
}


class DenseAttend:
    """Keeps every layer's keys and values in a list and attends over all of them: one request, no paging."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._kept:
            k, v = torch.cat((self._kept[layer][0], k)), torch.cat((self._kept[layer][1], v))
        self._kept[layer] = (k, v)
        new, total = q.shape[0], k.shape[0]
        seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        group = q.shape[1] // k.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1).transpose(0, 1) for each in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen)
        return out.transpose(0, 1).reshape(new, -1)


def prompt(tokens: int, vocab: int = 320) -> Tensor:
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(tokens))


def load(folder: Path) -> Any:
    return load_model(folder, ModelConfig.load(folder), TensorParallel(), "cpu", torch.float32)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_logits_equal_those_of_transformers(shape: Mapping[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, seed=1, **shape)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = prompt(100)

    logits = load(folder).forward(tokens, torch.arange(100), torch.arange(100), DenseAttend())

    torch.testing.assert_close(logits, reference(tokens.unsqueeze(0)).logits[0], atol=2e-3, rtol=1e-4)


@torch.inference_mode()
def test_a_prompt_in_chunks_and_tokens_one_by_one_give_the_logits_of_the_whole(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path))
    tokens = prompt(40)
    whole = model.forward(tokens, torch.arange(40), torch.tensor([39]), DenseAttend())

    attend = DenseAttend()
    for start, end in ((0, 16), (16, 38), (38, 39)):
        rows = torch.empty(0, dtype=torch.int64)
        none = model.forward(tokens[start:end], torch.arange(start, end), rows, attend)
        assert none.shape == (0, 320)
    last = model.forward(tokens[39:], torch.tensor([39]), torch.tensor([0]), attend)

    torch.testing.assert_close(last, whole, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_only_the_asked_rows_of_the_last_layer_are_computed_beyond_attention(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path, layers=3))
    step = (prompt(40), torch.arange(40))
    whole = model.hidden(*step, DenseAttend())
    counts: list[int] = []

    class Counted(TorchOps):
        def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
            counts.append(len(gate_up))
            return TORCH_OPS.gated(gate_up, activation)

    for layer in model.layers:
        object.__setattr__(layer.mlp, "ops", Counted())
    for asked in ([39], [3, 17, 39], []):
        rows, announced = torch.tensor(asked, dtype=torch.int64), list[int]()
        hidden = model.hidden(*step, DenseAttend(), announced.append, rows=rows)
        torch.testing.assert_close(hidden, whole[rows], atol=1e-4, rtol=1e-4)
        assert announced == [0, 1, 2]
        assert counts == [40, 40, *([len(asked)] if asked else [])]
        counts.clear()


@torch.inference_mode()
def test_each_layer_is_announced_right_after_its_keys_and_values_are_kept(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path, layers=3))
    seen: list[str] = []
    dense = DenseAttend()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(f"kept {layer}")
        return dense(layer, q, k, v)

    model.forward(
        prompt(5), torch.arange(5), torch.tensor([4]), attend, lambda layer: seen.append(f"announced {layer}")
    )

    assert seen == ["kept 0", "announced 0", "kept 1", "announced 1", "kept 2", "announced 2"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tie", [False, True])
@torch.inference_mode()
def test_tiny_models_answer_with_varying_tokens_and_a_clear_best_logit(tie: bool, seed: int, tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path, seed=seed, tie=tie))
    attend, tokens, at = DenseAttend(), prompt(17), 0
    answer: list[int] = []
    margins: list[float] = []
    for _ in range(32):
        positions = torch.arange(at, at + len(tokens))
        logits = model.forward(tokens, positions, torch.tensor([len(tokens) - 1]), attend)[0]
        at += len(tokens)
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        tokens = best.indices[:1]
        answer.append(int(tokens))

    assert len(set(answer)) > 16
    assert min(margins) > 1e-3
