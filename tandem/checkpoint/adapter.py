"""A LoRA adapter's files, as PEFT writes them: what they hold, whether they fit a model, and which content they are.
Torch-free."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError, safe_open

from tandem.checkpoint.disk_room import check_room
from tandem.checkpoint.json_fields import JsonFields
from tandem.checkpoint.model_config import ModelConfig
from tandem.config.model import AdapterSpec
from tandem.errors import CheckpointError, ConfigError
from tandem.files import cache_dir, sync_file, sync_folder

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_CHUNK_BYTES = 1 << 20
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_NONE_OF = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>A|B)\.weight")
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d{1,9})\.(?P<name>self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")


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
        try:
            folder = _folder(spec.source)
            _check_config(JsonFields.read(folder / CONFIG_FILE))
            rank = _checked_rank(folder / WEIGHTS_FILE, config)
            return cls(spec.name, folder, adapter_fingerprint(folder), rank)
        except CheckpointError as error:
            raise CheckpointError(f"adapters: {spec.name}: {error.message}", field="adapters") from error


def copied_adapter(folder: Path, fingerprint: str) -> Path:
    """A copy of the adapter in this host's cache, named by its content. A broken one is replaced. Raises ConfigError if
    it has to be made and `folder` has other content, cannot be read, or does not fit on the disk."""
    if not _FINGERPRINT.fullmatch(fingerprint):  # it becomes part of a path
        raise ConfigError(f"adapters: expected a fingerprint of 32 hex digits, got {fingerprint[:40]!r}")
    kept = cache_dir() / "adapters"
    target = kept / fingerprint
    if _is_whole(target, fingerprint):
        return target
    try:
        names = (CONFIG_FILE, WEIGHTS_FILE)
        check_room(kept, f"the adapter in {folder}", sum((folder / name).stat().st_size for name in names))
        kept.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept) as making:
            made = Path(making) / fingerprint
            made.mkdir()
            for name in names:
                shutil.copyfile(folder / name, made / name)
                sync_file(made / name)
            sync_folder(made)
            if not _is_whole(made, fingerprint):
                raise ConfigError(f"{folder}: its files changed after they were checked: apply the configuration again")
            if target.is_dir():
                target.rename(Path(making) / "broken")
            made.rename(target)
        sync_folder(kept)
    except OSError as error:
        if not _is_whole(target, fingerprint):  # else another worker was faster
            raise ConfigError(f"{folder}: cannot be copied to {target}: {error}") from error
    return target


def _is_whole(copy: Path, fingerprint: str) -> bool:
    try:
        return adapter_fingerprint(copy) == fingerprint
    except CheckpointError:
        return False


def adapter_elements(config: ModelConfig, rank: int) -> int:
    """The elements of an adapter of this rank that has matrices for all modules it may have."""
    return rank * config.layers * sum(inputs + outputs for inputs, outputs in _sizes(config).values())


def _folder(source: str) -> Path:
    try:
        return Path(source).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"source: expected a folder, got {source!r}: {error}") from error


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
        if (place := _LAYER.fullmatch(module)) is None:
            raise CheckpointError(f"{path}: expected matrices of model.layers.N with {', '.join(sizes)}, got {module}")
        size = sizes[place["name"]]
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
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, feed_forward),
        "mlp.up_proj": (hidden, feed_forward),
        "mlp.down_proj": (feed_forward, hidden),
    }
