"""A model of an 8B model's shape with random weights, for measurements on a GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

ELEMENT_BYTES = 2  # bfloat16
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """Sizes of the model, then of the measurements."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    batches: tuple[int, ...] = (1, 64)
    context: int = 2048
    prefill: int = 8192
    steps: int = 40
    rounds: int = 5
    copy_bytes: int = 2 << 30
    matrix: int = 8192

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices of one layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q": (query, self.hidden), "k": (key, self.hidden), "v": (key, self.hidden)}
        attention["o"] = (self.hidden, query)
        mlp = {"gate": (self.intermediate, self.hidden), "up": (self.intermediate, self.hidden)}
        mlp["down"] = (self.hidden, self.intermediate)
        return {f"self_attn.{name}_proj": shape for name, shape in attention.items()} | {
            f"mlp.{name}_proj": shape for name, shape in mlp.items()
        }

    @property
    def weights(self) -> int:
        """Weights in the matrices that a step multiplies by; it reads only a few rows of the embedding."""
        return self.layers * sum(rows * columns for rows, columns in self.shapes.values()) + self.vocab * self.hidden

    def step_bytes(self, batch: int, context: float) -> float:
        """Bytes that one decode step must read: the weights, and keys and values of every request."""
        kv_token = self.layers * 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES
        return self.weights * ELEMENT_BYTES + batch * context * kv_token

    def prompt_flops(self) -> float:
        """Products with the layers' weights for each token, with the output matrix once, and causal attention."""
        of_layers = 2.0 * (self.weights - self.vocab * self.hidden) * self.prefill
        attention = 2.0 * self.layers * self.heads * self.head_dim * self.prefill**2  # half of two full products
        return of_layers + attention + 2.0 * self.vocab * self.hidden


QUICK = DeviceSizes(2, 64, 128, 4, 2, 16, 300, (1, 3), 24, 96, 6, 1, 1 << 16, 64)


def write_weights(folder: Path, sizes: DeviceSizes, device: torch.device) -> None:
    """Writes a checkpoint with one file per layer, generated on the device."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "vocab_size": sizes.vocab, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "head_dim": sizes.head_dim,
        "num_key_value_heads": sizes.kv_heads, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "max_position_embeddings": 4 * sizes.prefill, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        wide = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        return wide.mul_(columns**-0.5)

    def norm() -> Tensor:
        return torch.ones(sizes.hidden, device=device, dtype=torch.bfloat16)

    files = {
        "ends": {
            "model.embed_tokens.weight": matrix(sizes.vocab, sizes.hidden),
            "model.norm.weight": norm(),
            "lm_head.weight": matrix(sizes.vocab, sizes.hidden),
        }
    }
    weight_map: dict[str, str] = {}
    for number in range(-1, sizes.layers):
        if number >= 0:
            prefix = f"model.layers.{number}."
            made = {f"{prefix}{name}.weight": matrix(*shape) for name, shape in sizes.shapes.items()}
            norms = ("input_layernorm", "post_attention_layernorm")
            files = {f"layer-{number}": made | {f"{prefix}{name}.weight": norm() for name in norms}}
        for name, tensors in files.items():
            save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@contextmanager
def model_folder(folder: Path | None, sizes: DeviceSizes, device: torch.device) -> Iterator[Path]:
    """The model in `folder`, written there unless a run before did; None: in a temporary folder."""
    with tempfile.TemporaryDirectory() as scratch:
        chosen = folder or Path(scratch)
        if not (chosen / INDEX_FILE).exists():  # written last
            chosen.mkdir(parents=True, exist_ok=True)
            write_weights(chosen, sizes, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # other processes measure on this GPU too
        yield chosen
