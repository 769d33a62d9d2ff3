"""A checkpoint's shape, read from its `config.json`. Torch-free, because router, planner and command line use it
too."""

from __future__ import annotations

import hashlib
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem.checkpoint.json_fields import MAX_JSON_BYTES, JsonFields, read_json_object, read_small_file
from tandem.checkpoint.model_families import FAMILIES, PLAIN, TEXT_DEFAULTS, Family, Sizes, Traits
from tandem.errors import CheckpointError, ConfigError

_MAX_LAYERS: Final = 4096
_SAMPLES_PER_FILE: Final = 16
_SAMPLE_BYTES: Final = 256
# The text part of a model that takes images too, and other names of sizes in it.
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")
_ALIASES: Final = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
}
_IMAGE_FILES: Final = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`is_ours`: Tandem's own engine runs it; of other models, `traits` are Llama's, whatever they have."""

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
    is_ours: bool = True

    @classmethod
    def load(cls, model_dir: Path, architecture: str | None = None) -> ModelConfig:
        """Of a model for Tandem's own engine. Reads `config.json`, and the end tokens of `generation_config.json` if it
        exists. `architecture`: None: what `config.json` says.

        Raises CheckpointError naming the file, the field, what was expected and what was found.
        """
        config = JsonFields.read(model_dir / "config.json")
        architecture = architecture or _architecture(config)
        _refuse_quantised(config)
        return cls._read(model_dir, config, architecture, FAMILIES[architecture], is_ours=True)

    @classmethod
    def of_any(cls, model_dir: Path) -> ModelConfig:
        """Of any model of text, or text and images, for another engine. Raises CheckpointError as `load`."""
        config = JsonFields.read(model_dir / "config.json")
        with suppress(CheckpointError):  # of another architecture, or with a setting that only other engines have
            return cls.load(model_dir)
        names = config.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise config.wrong("architectures", "a list with a name", names)
        return cls._read(model_dir, _text_part(config), names[0], PLAIN, is_ours=False)

    @classmethod
    def _read(
        cls, model_dir: Path, config: JsonFields, architecture: str, family: Family, *, is_ours: bool
    ) -> ModelConfig:
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
        intermediate = config.positive_int("intermediate_size", default=None if is_ours else 4 * hidden)
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
            is_ours=is_ours,
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
            heads = [f"{self.heads} query heads", f"{self.kv_heads} KV heads"]
            *parts, last = heads + [f"{count} {what}" for what, count in self._mlp_parts()]
            raise ConfigError(
                f"{field}: expected one of {fitting} for a model of {', '.join(parts)} and {last}, got {tp}",
                field=field,
            )

    def _mlp_parts(self) -> list[tuple[str, int]]:
        """What the ranks divide among them in each MLP: (what, how many)."""
        if not self.is_ours:
            return []  # not known
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

    Covers `config.json`, the files that say how images are read, and each safetensors file's name, size, header and
    sampled bytes. Raises CheckpointError if the directory lacks a config or weights.
    """
    digest = hashlib.sha256(read_small_file(model_dir / "config.json"))
    for path in (model_dir / name for name in _IMAGE_FILES):
        if path.exists():
            digest.update(read_small_file(path))
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


def _text_part(config: JsonFields) -> JsonFields:
    """The sizes of any model, by the names that ours have."""
    values = dict(config.values)
    inner = next((values[name] for name in _TEXT_PARTS if isinstance(values.get(name), dict)), None)
    if inner is not None and "num_hidden_layers" not in values:
        own = {name: values.get(name) for name in ("tie_word_embeddings", "eos_token_id", "bos_token_id")}
        given = {name: value for name, value in inner.items() if value is not None}
        values = {**TEXT_DEFAULTS.get(str(inner.get("model_type")), {}), **own, **given}
    for name, aliases in _ALIASES.items():
        other = next((values[each] for each in aliases if values.get(each) is not None), None)
        if values.get(name) is None and other is not None:
            values[name] = other
    if values.get("multi_query") is True and not values.get("new_decoder_architecture"):
        values["num_key_value_heads"] = 1
    return JsonFields(config.path, values)


def _architecture(config: JsonFields) -> str:
    names = config.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in FAMILIES:
        return str(names[0])
    raise config.wrong(
        "architectures", f"one of {', '.join(FAMILIES)} (others by another engine: engine.kind: vllm)", names
    )


def _refuse_quantised(config: JsonFields) -> None:
    quantization = config.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise config.wrong(
            "quantization_config",
            "none (float weights; GGUF files may be quantised; others by another engine: engine.kind: vllm)",
            method,
        )
