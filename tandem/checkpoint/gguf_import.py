"""Converts a llama-architecture GGUF file to a Hugging Face directory. The only module that imports `gguf`.

Quantised weights are dequantised exactly to fp32; fp16 and bf16 weights keep their dtype. Tensors are converted one at
a time, so memory holds one of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from tandem.checkpoint.disk_room import check_room
from tandem.checkpoint.tokenizer_json import (
    BYTE_LEVEL,
    DIGITS_THEN_BYTE_LEVEL,
    BytePairTokenizer,
    Json,
    split_then_bytes,
)
from tandem.errors import CheckpointError

_Array = NDArray[Any]
_T = TypeVar("_T")

_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # llama.cpp's token types

_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """What a name in `tokenizer.ggml.pre` means."""

    pre_tokenizer: Json
    normalizer: Json | None = None
    ignore_merges: bool = False
    adds_bos: bool = False  # if the file does not say


_LLAMA3 = _PreTokenizer(split_then_bytes(_LLAMA3_WORDS), ignore_merges=True, adds_bos=True)
_PRE_TOKENIZERS: Final = {
    "gpt-2": _PreTokenizer(BYTE_LEVEL),
    "smollm": _PreTokenizer(DIGITS_THEN_BYTE_LEVEL),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(
        split_then_bytes(_LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")), normalizer={"type": "NFC"}
    ),
}


def import_gguf(path: Path, directory: Path, progress: Callable[[str], None]) -> None:
    """Writes config, weights, tokenizer and chat template into `directory`, which exists and is empty.

    Raises CheckpointError naming the file if it is corrupt, truncated or of another architecture, and
    InsufficientMemory if the disk has no room for its weights.
    """
    progress(f"reading {path.name}")
    source = _Source.open(path)
    config = source.config()
    tokenizer, settings = source.tokenizer()
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(directory / "tokenizer_config.json", settings)
    progress(f"converting {path.name} to safetensors")
    source.write_weights(directory / "model.safetensors", config)


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


class _Source:
    """An open GGUF file."""

    def __init__(self, path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields
        self._tensors = tensors

    @classmethod
    def open(cls, path: Path) -> _Source:
        try:
            reader = gguf.GGUFReader(path)
            fields = {name: field.contents() for name, field in reader.fields.items()}
            return cls(path, fields, {tensor.name: tensor for tensor in reader.tensors})
        except Exception as error:  # the library validates little: a damaged file raises numpy errors of any kind
            raise CheckpointError(f"{path}: expected an intact GGUF file, got: {error}", field="model") from error

    def wrong(self, what: str, expected: str, got: object) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}: expected {expected}, got {got!r}", field="model")

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        value = self._fields.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(key, f"a {kind.__name__}", value)
        return value

    def maybe_int(self, key: str) -> int | None:
        return self.get(key, int) if key in self._fields else None

    def config(self) -> Json:
        """`config.json`. `write_weights` checks the tensors' sizes against it."""
        architecture = self.get("general.architecture", str)
        if architecture != "llama":
            raise self.wrong("general.architecture", "llama", architecture)
        if self.get("llama.expert_count", int, 0):
            raise self.wrong("llama.expert_count", "0 (no mixture of experts)", self._fields["llama.expert_count"])
        heads, hidden = self.get("llama.attention.head_count", int), self.get("llama.embedding_length", int)
        if heads < 1 or hidden < 1:
            raise self.wrong("llama.attention.head_count", "at least 1, and llama.embedding_length too", heads)
        head_dim = self.get("llama.attention.key_length", int, hidden // heads)
        turned = self.get("llama.rope.dimension_count", int, head_dim)
        if turned != head_dim:
            raise self.wrong("llama.rope.dimension_count", f"the whole head ({head_dim})", turned)
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise self.wrong("token_embd.weight", "this tensor", None)
        theta = _shortest(self.get("llama.rope.freq_base", float, 10_000.0))
        eos = {self.maybe_int(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(embedding.shape[-1]),
            "hidden_size": hidden,
            "intermediate_size": self.get("llama.feed_forward_length", int),
            "num_hidden_layers": self.get("llama.block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("llama.attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": _shortest(self.get("llama.attention.layer_norm_rms_epsilon", float, 1e-5)),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(head_dim, theta),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "max_position_embeddings": self.get("llama.context_length", int),
            "bos_token_id": self.maybe_int("tokenizer.ggml.bos_token_id"),
            "eos_token_id": sorted(each for each in eos if each is not None),
            "dtype": "float32",
        }

    def _rope_scaling(self, head_dim: int, theta: float) -> Json | None:
        if _ROPE_FACTORS in self._tensors:
            return self._llama3_scaling(self._array(_ROPE_FACTORS).astype(np.float64), head_dim, theta)
        kind = self.get("llama.rope.scaling.type", str, "none")
        if kind == "none":
            return None
        if kind != "linear":
            raise self.wrong("llama.rope.scaling.type", "none or linear", kind)
        return {"rope_type": "linear", "factor": self.get("llama.rope.scaling.factor", float)}

    def _llama3_scaling(self, factors: _Array, head_dim: int, theta: float) -> Json:
        """GGUF keeps only the divisors that Llama 3's scaling produced. Finds the settings that produce them."""
        if factors.shape != (head_dim // 2,):
            raise self.wrong(_ROPE_FACTORS, f"{head_dim // 2} numbers", factors.shape)
        factor, low, high, original = float(round(factors.max(), 4)), 1.0, 4.0, 8192
        inv_freq = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        kept = np.clip((original * inv_freq / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
        if not np.allclose(1 / ((1 - kept) / factor + kept), factors, rtol=1e-3):
            raise self.wrong(
                _ROPE_FACTORS, "Llama 3's RoPE scaling (low 1, high 4, original context 8192)", "other factors"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def tokenizer(self) -> tuple[Json, Json]:
        """`tokenizer.json` and `tokenizer_config.json`."""
        kind = self.get("tokenizer.ggml.model", str)
        name = self.get("tokenizer.ggml.pre", str, "unnamed")
        if kind != "gpt2" or name not in _PRE_TOKENIZERS:
            known = ", ".join(_PRE_TOKENIZERS)
            raise self.wrong(
                "tokenizer.ggml.pre", f"a byte-level BPE tokenizer (gpt2 with one of {known})", f"{kind} with {name}"
            )
        pre = _PRE_TOKENIZERS[name]
        pieces = self._strings("tokenizer.ggml.tokens")
        merges = [tuple(each.split(" ", 1)) for each in self._strings("tokenizer.ggml.merges")]
        types = self.get("tokenizer.ggml.token_type", list, [1] * len(pieces))
        if len(set(pieces)) != len(pieces) or len(types) != len(pieces):
            raise self.wrong("tokenizer.ggml.tokens", "distinct tokens, each with a type", f"{len(pieces)} tokens")
        wrong_merge = next((each for each in merges if len(each) != 2), None)
        if wrong_merge is not None:
            raise self.wrong("tokenizer.ggml.merges", "pairs of tokens", wrong_merge)
        bos = self._token_id("bos", len(pieces))
        eos = self._token_id("eos", len(pieces))
        adds_bos = bos is not None and self.get("tokenizer.ggml.add_bos_token", bool, pre.adds_bos)
        tokenizer = BytePairTokenizer(
            pieces,
            [(each[0], each[1]) for each in merges],
            special=[number for number, each in enumerate(types) if each == _CONTROL_TOKEN],
            added=[number for number, each in enumerate(types) if each == _USER_TOKEN],
            pre_tokenizer=pre.pre_tokenizer,
            normalizer=pre.normalizer,
            ignore_merges=pre.ignore_merges,
            bos_token_id=bos if adds_bos else None,
        )
        settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {f"{name}_token": pieces[each] for name, each in (("bos", bos), ("eos", eos)) if each is not None}
        if "tokenizer.chat_template" in self._fields:
            settings["chat_template"] = self.get("tokenizer.chat_template", str)
        return tokenizer.to_json(), settings

    def _strings(self, key: str) -> list[str]:
        values = self.get(key, list)
        if not all(isinstance(each, str) for each in values):
            raise self.wrong(key, "a list of strings", "other values")
        return values

    def _token_id(self, name: str, tokens: int) -> int | None:
        number = self.maybe_int(f"tokenizer.ggml.{name}_token_id")
        if number is not None and not 0 <= number < tokens:
            raise self.wrong(f"tokenizer.ggml.{name}_token_id", f"an id from 0 to {tokens - 1}", number)
        return number

    def write_weights(self, path: Path, config: Json) -> None:
        """A safetensors file: 8 bytes of header length, a JSON header with offsets, then the tensors."""
        names = self._hugging_face_names(config["num_hidden_layers"])
        header: Json = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, target in names.items():
            tensor = self._tensors[name]
            kind = _stored_dtype(tensor)
            size = math.prod(map(int, tensor.shape)) * (4 if kind == "F32" else 2)
            shape = [int(each) for each in reversed(tensor.shape)]
            header[target] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        check_room(path.parent, self._path.name, offset)
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with path.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name, target in names.items():
                array = self._unpermuted(name, self._array(name), config)
                if list(array.shape) != header[target]["shape"]:
                    raise self.wrong(name, f"shape {header[target]['shape']}", list(array.shape))
                file.write(np.ascontiguousarray(array).data)

    def _hugging_face_names(self, layers: int) -> dict[str, str]:
        names: dict[str, str] = {}
        for name in self._tensors:
            parts = name.split(".", 2)
            if name in _TOP_NAMES:
                names[name] = _TOP_NAMES[name]
            elif len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER_NAMES:
                names[name] = f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}"
            elif name != _ROPE_FACTORS:
                raise self.wrong(name, "a tensor of a dense llama model", "an unknown tensor")
        expected = 2 + ("output.weight" in self._tensors) + layers * len(_LAYER_NAMES)
        if len(set(names.values())) != expected:
            raise self.wrong("tensors", f"{expected} for {layers} layers", len(names))
        return names

    def _array(self, name: str) -> _Array:
        """Floats in row-major order; bf16 as its 16-bit patterns."""
        tensor = self._tensors[name]
        shape = tuple(int(each) for each in reversed(tensor.shape))
        try:
            if _stored_dtype(tensor) == "BF16":
                return np.asarray(tensor.data).view(np.uint16).reshape(shape)
            if _stored_dtype(tensor) == "F16":
                return np.asarray(tensor.data).reshape(shape)
            array: _Array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except (NotImplementedError, ValueError) as error:
            raise self.wrong(name, "a tensor that can be dequantised", f"{tensor.tensor_type.name}: {error}") from error
        if not np.isfinite(array.sum(dtype=np.float64)):
            raise self.wrong(name, "finite numbers", "NaN or infinity; the file is corrupt")
        return array.reshape(shape)

    def _unpermuted(self, name: str, array: _Array, config: Json) -> _Array:
        """GGUF interleaves the two halves of each head's q and k rows; Hugging Face keeps them apart."""
        if not name.endswith(("attn_q.weight", "attn_k.weight")):
            return array
        heads = config["num_attention_heads" if name.endswith("attn_q.weight") else "num_key_value_heads"]
        rows, columns = array.shape
        if heads < 1 or rows != heads * config["head_dim"]:
            raise self.wrong(name, f"{heads} heads of {config['head_dim']} rows", rows)
        return array.reshape(heads, config["head_dim"] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _stored_dtype(tensor: Any) -> str:
    kinds = {gguf.GGMLQuantizationType.F16: "F16", gguf.GGMLQuantizationType.BF16: "BF16"}
    return kinds.get(tensor.tensor_type, "F32")


def _shortest(value: float) -> float:
    """The shortest decimal of this fp32 number: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))
