"""A checkpoint's shape, read from its `config.json`. Torch-free: router, planner and command line use it too."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem.errors import CheckpointError, ConfigError

ARCHITECTURES: Final = ("LlamaForCausalLM",)
_MAX_JSON_BYTES: Final = 64 << 20
_MAX_LAYERS: Final = 4096
_SAMPLES_PER_FILE: Final = 16
_SAMPLE_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every RoPE frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_tokens: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    max_position_tokens: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """From `config.json`, and the end tokens of `generation_config.json` where there is one.

        Raises CheckpointError naming the file and the field, what was expected and what came.
        """
        config = _Fields.read(model_dir / "config.json")
        architecture = config.architecture()
        config.refuse_what_changes_the_model()
        heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
        head_dim = config.positive_int("head_dim", default=hidden // heads)
        kv_heads = config.positive_int("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        if head_dim % 2:
            raise config.wrong("head_dim", "an even number (rotary embedding turns pairs)", head_dim)
        layers = config.positive_int("num_hidden_layers")
        if layers > _MAX_LAYERS:
            raise config.wrong("num_hidden_layers", f"at most {_MAX_LAYERS}", layers)
        rope_theta, rope_scaling = config.rope()
        eos = config.token_ids("eos_token_id")
        if (model_dir / "generation_config.json").exists():
            eos |= _Fields.read(model_dir / "generation_config.json").token_ids("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=config.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.positive_int("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.positive_float("rms_norm_eps", default=1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=config.boolean("tie_word_embeddings"),
            max_position_tokens=config.positive_int("max_position_embeddings", default=2048),
            bos_token_id=min(config.token_ids("bos_token_id"), default=None),
            eos_token_ids=eos,
            attention_bias=config.boolean("attention_bias"),
            mlp_bias=config.boolean("mlp_bias"),
        )

    def fits_tp(self, tp: int) -> bool:
        """Whole query heads and MLP rows on each rank; KV heads whole, or each replicated over equally many ranks."""
        if tp < 1 or self.heads % tp or self.intermediate_size % tp:
            return False
        return self.kv_heads % tp == 0 or tp % self.kv_heads == 0

    def fitting_tps(self) -> tuple[int, ...]:
        return tuple(tp for tp in range(1, self.heads + 1) if self.fits_tp(tp))

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError that says which widths fit."""
        if not self.fits_tp(tp):
            fitting = ", ".join(map(str, self.fitting_tps()))
            raise ConfigError(
                f"tp: expected one of {fitting} for a model of {self.heads} query heads, {self.kv_heads} KV heads and "
                f"{self.intermediate_size} MLP rows, got {tp}",
                field="tp",
            )

    def rank_kv_heads(self, tp: int) -> int:
        """KV heads that each rank holds; 1, replicated, when there are more ranks than KV heads."""
        return max(1, self.kv_heads // tp)


def fingerprint(model_dir: Path) -> str:
    """32 hex digits that tell checkpoints apart without reading their weights whole.

    Covers `config.json` and, of each safetensors file, its name, size, header and sampled bytes. Raises
    CheckpointError when the directory has neither.
    """
    digest = hashlib.sha256(_read_bytes(model_dir / "config.json"))
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir}: expected *.safetensors files, found none", field="model")
    for path in files:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        try:
            with path.open("rb") as file:
                head = file.read(8)
                header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
                digest.update(head + file.read(min(header_bytes, _MAX_JSON_BYTES, size)))
                for sample in range(_SAMPLES_PER_FILE):
                    file.seek(max(0, size - _SAMPLE_BYTES) * (sample + 1) // _SAMPLES_PER_FILE)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, got: {error.strerror}", field="model") from error
    return digest.hexdigest()[:32]


def read_json_object(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got: {error}", field="model") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(value).__name__}", field="model")
    return value


def _read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: expected at most {_MAX_JSON_BYTES} bytes, got a file of {size}", field="model"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected this file in a checkpoint, found none", field="model") from error
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, got: {error.strerror}", field="model") from error


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed reads from one JSON object; each error names the file and the field."""

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Fields:
        return cls(path, read_json_object(path))

    def wrong(self, field: str, expected: str, got: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {field}: expected {expected}, got {got!r}", field=field)

    def positive_int(self, field: str, *, default: int | None = None) -> int:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.wrong(field, "a positive integer", value)
        return value

    def positive_float(self, field: str, *, default: float | None = None) -> float:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(field, "a positive number", value)
        return float(value)

    def boolean(self, field: str) -> bool:
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(field, "true or false", value)
        return bool(value)

    def token_ids(self, field: str) -> frozenset[int]:
        """One id, a list of ids, or none."""
        value = self.values.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in ids):
            raise self.wrong(field, "a token id or a list of them", value)
        return frozenset(ids)

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
            return str(names[0])
        raise self.wrong("architectures", f"one of {', '.join(ARCHITECTURES)}", names)

    def refuse_what_changes_the_model(self) -> None:
        """Settings of other architectures or storage forms that would silently give wrong tokens."""
        activation = self.values.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self.wrong("hidden_act", "silu", activation)
        quantization = self.values.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise self.wrong("quantization_config", "none (float weights; GGUF files may be quantised)", method)

    def rope(self) -> tuple[float, RopeScaling | None]:
        """(theta, scaling), from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
        field = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        found = self.values.get(field)
        if found is None:
            return self.positive_float("rope_theta", default=10_000.0), None
        if not isinstance(found, dict):
            raise self.wrong(field, "an object", found)
        rope = _Fields(self.path, found)
        theta = (rope if found.get("rope_theta") is not None else self).positive_float("rope_theta", default=10_000.0)
        kind = found.get("rope_type", found.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, LinearScaling(rope.positive_float("factor"))
        if kind != "llama3":
            raise self.wrong(f"{field}.rope_type", "default, linear or llama3", kind)
        scaling = Llama3Scaling(
            factor=rope.positive_float("factor"),
            low_freq_factor=rope.positive_float("low_freq_factor"),
            high_freq_factor=rope.positive_float("high_freq_factor"),
            original_max_position_tokens=rope.positive_int("original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise self.wrong(f"{field}.high_freq_factor", "more than low_freq_factor", scaling.high_freq_factor)
        return theta, scaling
