"""A checkpoint's shape, read from its `config.json`. Torch-free, because router, planner and command line use it
too."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem.checkpoint.json_fields import MAX_JSON_BYTES, JsonFields, read_json_object, read_small_file
from tandem.checkpoint.model_families import FAMILIES, Sizes, Traits
from tandem.errors import CheckpointError, ConfigError

_MAX_LAYERS: Final = 4096
_SAMPLES_PER_FILE: Final = 16
_SAMPLE_BYTES: Final = 256


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
    tie_word_embeddings: bool
    max_position_tokens: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    traits: Traits

    @classmethod
    def load(cls, model_dir: Path, architecture: str | None = None) -> ModelConfig:
        """Reads `config.json`, and the end tokens of `generation_config.json` if it exists. `architecture`: None: what
        `config.json` says.

        Raises CheckpointError naming the file, the field, what was expected and what was found.
        """
        config = JsonFields.read(model_dir / "config.json")
        architecture = architecture or _architecture(config)
        family = FAMILIES[architecture]
        _refuse_quantised(config)
        heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
        head_dim = config.positive_int("head_dim", default=family.head_dim or hidden // heads)
        kv_heads = config.positive_int("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        if head_dim % 2:
            raise config.wrong("head_dim", "an even number (rotary embedding rotates pairs)", head_dim)
        layers = config.positive_int("num_hidden_layers")
        if layers > _MAX_LAYERS:
            raise config.wrong("num_hidden_layers", f"at most {_MAX_LAYERS}", layers)
        intermediate = config.positive_int("intermediate_size")
        eos = config.token_ids("eos_token_id")
        if (model_dir / "generation_config.json").exists():
            eos |= JsonFields.read(model_dir / "generation_config.json").token_ids("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=config.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=intermediate,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.positive_float("rms_norm_eps", default=1e-6),
            tie_word_embeddings=config.boolean("tie_word_embeddings", default=family.ties),
            max_position_tokens=config.positive_int("max_position_embeddings", default=2048),
            bos_token_id=min(config.token_ids("bos_token_id"), default=None),
            eos_token_ids=eos,
            traits=family.traits(config, Sizes(layers, hidden, head_dim, intermediate)),
        )

    def fits_tp(self, tp: int) -> bool:
        """Whether each rank gets whole query heads, MLP rows and experts, and either whole KV heads or one replicated
        KV head."""
        if tp < 1 or self.heads % tp or any(parts % tp for _, parts in self._mlp_parts()):
            return False
        return self.kv_heads % tp == 0 or tp % self.kv_heads == 0

    def fitting_tps(self) -> tuple[int, ...]:
        return tuple(tp for tp in range(1, self.heads + 1) if self.fits_tp(tp))

    def check_tp(self, tp: int, field: str = "tp") -> None:
        """`field` is the option's name in the configuration. Raises ConfigError listing the widths that fit."""
        if not self.fits_tp(tp):
            fitting = ", ".join(map(str, self.fitting_tps()))
            parts = " and ".join(f"{count} {what}" for what, count in self._mlp_parts())
            raise ConfigError(
                f"{field}: expected one of {fitting} for a model of {self.heads} query heads, {self.kv_heads} KV "
                f"heads and {parts}, got {tp}",
                field=field,
            )

    def _mlp_parts(self) -> list[tuple[str, int]]:
        """What the ranks divide among them in each MLP: (what, how many)."""
        experts = self.traits.experts
        parts = [("experts", experts.count)] if experts else []
        if experts is None or not all(experts.sparse):
            parts.append(("MLP rows", self.intermediate_size))
        return parts

    def rank_kv_heads(self, tp: int) -> int:
        """KV heads that each rank holds. With more ranks than KV heads, each rank holds one, replicated."""
        return max(1, self.kv_heads // tp)


def embeds_by_last_token(model_dir: Path) -> bool:
    """Whether a text's embedding is the last hidden state of its last token. A checkpoint of sentence-transformers may
    ask for another pooling, more layers after it, or attention in both directions. Raises CheckpointError naming the
    file."""
    pooling = model_dir / "1_Pooling" / "config.json"
    if pooling.exists() and read_json_object(pooling).get("pooling_mode_lasttoken") is not True:
        return False
    is_causal = read_json_object(model_dir / "config.json").get("is_causal") is not False
    return is_causal and not (model_dir / "2_Dense").exists()


def fingerprint(model_dir: Path) -> str:
    """32 hex digits that identify a checkpoint without reading all its weights.

    Covers `config.json` and each safetensors file's name, size, header and sampled bytes. Raises CheckpointError if the
    directory lacks either.
    """
    digest = hashlib.sha256(read_small_file(model_dir / "config.json"))
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
                digest.update(head + file.read(min(header_bytes, MAX_JSON_BYTES, size)))
                for sample in range(_SAMPLES_PER_FILE):
                    file.seek(max(0, size - _SAMPLE_BYTES) * (sample + 1) // _SAMPLES_PER_FILE)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, got: {error.strerror}", field="model") from error
    return digest.hexdigest()[:32]


def _architecture(config: JsonFields) -> str:
    names = config.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in FAMILIES:
        return str(names[0])
    raise config.wrong("architectures", f"one of {', '.join(FAMILIES)}", names)


def _refuse_quantised(config: JsonFields) -> None:
    quantization = config.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise config.wrong("quantization_config", "none (float weights; GGUF files may be quantised)", method)
