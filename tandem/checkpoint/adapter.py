"""A LoRA adapter's files, as PEFT writes them: what they hold, whether they fit a model, and which content they are.
Torch-free."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tandem.checkpoint.json_fields import JsonFields
from tandem.checkpoint.model_config import ModelConfig
from tandem.config.model import AdapterSpec
from tandem.errors import CheckpointError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_CHUNK_BYTES = 1 << 20
_NONE_OF = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>A|B)\.weight")
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(self_attn|mlp)\.(?P<name>\w+)")


@dataclass(frozen=True, slots=True)
class Adapter:
    """`fingerprint`: 32 hex digits of the content of both files. `rank`: the largest of its tensors."""

    name: str
    folder: Path
    fingerprint: str
    rank: int

    @classmethod
    def load(cls, spec: AdapterSpec, config: ModelConfig) -> Adapter:
        """Raises CheckpointError, naming the adapter, for files that cannot be read or do not fit the model."""
        folder = Path(spec.source).expanduser().resolve()
        try:
            _check_config(JsonFields.read(folder / CONFIG_FILE))
            rank = _checked_rank(folder / WEIGHTS_FILE, config)
            return cls(spec.name, folder, adapter_fingerprint(folder), rank)
        except CheckpointError as error:
            raise CheckpointError(f"adapters: {spec.name}: {error.message}", field="adapters") from error


def adapter_fingerprint(folder: Path) -> str:
    """Reads both files whole. Raises CheckpointError."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        try:
            digest.update(f"{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, got: {error.strerror}") from error
    return digest.hexdigest()[:32]


def _check_config(config: JsonFields) -> None:
    values = config.values
    if (kind := values.get("peft_type")) != "LORA":
        raise config.wrong("peft_type", "LORA", kind)
    if (bias := values.get("bias", "none")) != "none":
        raise config.wrong("bias", "none", bias)
    for name in _NONE_OF:
        if given := values.get(name):
            raise config.wrong(name, "none: only low-rank matrices are served", given)


def _checked_rank(path: Path, config: ModelConfig) -> int:
    modules: dict[str, dict[str, list[int]]] = {}
    for name, shape in _shapes(path):
        if (found := _TENSOR.fullmatch(name)) is None or len(shape) != 2:
            raise CheckpointError(
                f"{path}: expected matrices named base_model.model.MODULE.lora_A.weight and lora_B.weight, got {name} "
                f"of shape {shape}"
            )
        modules.setdefault(found["module"], {})[found["side"]] = shape
    if not modules:
        raise CheckpointError(f"{path}: expected matrices of at least one module, found none")
    sizes = _sizes(config)
    rank = 0
    for module, sides in modules.items():
        if sides.keys() != {"A", "B"} or sides["A"][0] != sides["B"][1]:
            raise CheckpointError(f"{path}: {module}: expected lora_A and lora_B of one rank, got {sides}")
        rank = max(rank, sides["A"][0])
        place = _LAYER.fullmatch(module)
        if place is None or (size := sizes.get(place["name"])) is None:
            continue  # the engine says whether it has such a module
        if int(place["layer"]) >= config.layers:
            raise CheckpointError(f"{path}: {module}: expected one of the model's {config.layers} layers")
        if (got := (sides["A"][1], sides["B"][0])) != size:
            raise CheckpointError(
                f"{path}: {module}: expected matrices for {size[0]} inputs and {size[1]} outputs, as the model has, "
                f"got {got[0]} and {got[1]}"
            )
    return rank


def _shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected this file, found none")
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_slice(name).get_shape()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, got: {error}") from error


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's projections."""
    hidden, feed_forward = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, feed_forward),
        "up_proj": (hidden, feed_forward),
        "down_proj": (feed_forward, hidden),
    }
