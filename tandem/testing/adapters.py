"""Random LoRA adapters of a checkpoint for tests, and what it becomes with one. Torch-free."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tandem.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def write_adapter(
    folder: Path,
    model_dir: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    modules: Sequence[str] = MODULES,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Strong enough to change nearly every token. `config`: more fields of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, weight in load_file(model_dir / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(modules)):
            outputs, inputs = weight.shape
            made = {"A": (rank, inputs), "B": (outputs, rank)}
            for side, shape in made.items():
                drawn = rng.standard_normal(shape, np.float32) * np.float32(0.7 / shape[1] ** 0.5)
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = drawn
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*modules], "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(fields | dict(config or {})))
    return folder


def write_merged(folder: Path, model_dir: Path, adapter: Path) -> Path:
    """The checkpoint whose weights are the model's with the adapter's added."""
    shutil.copytree(model_dir, folder)
    fields = json.loads((adapter / CONFIG_FILE).read_text())
    tensors, weights = load_file(adapter / WEIGHTS_FILE), load_file(model_dir / "model.safetensors")
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in tensors:
            low, high = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
            weights[name] = weights[name] + np.float32(fields["lora_alpha"] / fields["r"]) * (high @ low)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
