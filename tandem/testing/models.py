"""Fakes for tests: a manual clock, planned faults, and a tiny random Llama checkpoint.

Torch-free.
"""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tandem.checkpoint.tokenizer_json import BytePairTokenizer

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_JOINED: Final = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_SMALLEST_VOCAB: Final = len(SPECIAL_TOKENS) + 256


class FakeClock:
    """Time advances only with `advance`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds: expected 0 or more, got {seconds}; monotonic time never goes back")
        self._now_s += seconds


class OperationFaultKind(StrEnum):
    """Kinds of faults of an operation."""

    FAIL = "fail"  # it raises, or its connection fails
    DELAY = "delay"
    DROP = "drop"  # it appears to succeed, but does nothing
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # it takes effect after the next one
    TRUNCATE = "truncate"  # half of it takes effect, then its connection fails
    FLIP = "flip"  # one bit of it changes
    MISADDRESS = "misaddress"  # it is well-formed, but has a wrong destination
    HANG = "hang"  # it never returns


@dataclass(frozen=True, slots=True)
class OperationFault:
    """`number`: 32 random bits that select details, such as which bit to flip."""

    kind: OperationFaultKind
    number: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """Which operations fail, and how.

    Args:
        kinds: faults to choose from.
        points: names of operations; empty means all.
        every: every n-th operation at these points fails. Excludes `rate`.
        rate: probability that an operation fails.
        first: number of operations before the first fault.
        limit: maximum number of faults.
        delay_s: duration of a DELAY.
    """

    seed: int = 0
    kinds: tuple[str, ...] = tuple(OperationFaultKind)
    points: tuple[str, ...] = ()
    every: int | None = None
    rate: float | None = None
    first: int = 0
    limit: int | None = None
    delay_s: float = 0.02

    def __post_init__(self) -> None:
        if (self.every is None) == (self.rate is None):
            raise ValueError("faults: expected exactly one of every and rate")
        if (self.every is not None and self.every < 1) or (self.rate is not None and not 0 <= self.rate <= 1):
            raise ValueError(f"faults: expected every >= 1 or 0 <= rate <= 1, got {self.every}, {self.rate}")
        if unknown := set(self.kinds) - set(OperationFaultKind):
            raise ValueError(f"faults: expected kinds of {[*OperationFaultKind]}, got {sorted(unknown)}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FaultSettings:
        """Raises ValueError for invalid settings."""
        try:
            fields = json.loads(text)
            fields |= {name: tuple(fields[name]) for name in ("kinds", "points") if name in fields}
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"faults: {error}") from error


class FaultPlan:
    """Decides for each operation whether it fails. The same settings and operations give the same faults.

    Args:
        on_fault: called before each fault.
    """

    def __init__(self, settings: FaultSettings, on_fault: Callable[[str, OperationFault], None] | None = None) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._on_fault = on_fault
        self._seen = 0
        self.broken = 0

    def is_at(self, point: str) -> bool:
        """Whether this point is named explicitly, for operations that would disturb the counts of others."""
        return point in self._settings.points

    def next(
        self, point: str, can: Collection[OperationFaultKind] = tuple(OperationFaultKind)
    ) -> OperationFault | None:
        """Counts one operation at `point`, and returns its fault, if any. `can`: faults that this point supports."""
        settings = self._settings
        kinds = [kind for kind in OperationFaultKind if kind in settings.kinds and kind in can]
        if not kinds or (settings.points and point not in settings.points):
            return None
        self._seen += 1
        if self._seen <= settings.first or (settings.limit is not None and self.broken >= settings.limit):
            return None
        if settings.every is not None:
            breaks = (self._seen - settings.first) % settings.every == 0
        else:
            breaks = self._random.random() < (settings.rate or 0.0)
        if not breaks:
            return None
        self.broken += 1
        fault = OperationFault(self._random.choice(kinds), self._random.getrandbits(32), settings.delay_s)
        if self._on_fault is not None:
            self._on_fault(point, fault)
        return fault


def write_tiny_llama(
    directory: Path,
    *,
    vocab: int = 320,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    max_positions: int = 2048,
    seed: int = 0,
    tie: bool = False,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    rope_theta: float = 10_000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    scale: float = 1.0,
) -> Path:
    """Writes a Hugging Face directory (config, weights, byte-level tokenizer, chat template) and returns it.

    Greedy decoding varies and has a clear best logit: the layers outweigh the token's own embedding, and the head's
    gain (`scale`) spreads the logits over several units. Without `eos_token_id` no output ends early. The vocabulary
    consists of three special tokens, 256 bytes and pairs of letters, so every token id has text.
    """
    if vocab < _SMALLEST_VOCAB:
        raise ValueError(f"vocab: expected at least {_SMALLEST_VOCAB} (special tokens and 256 bytes), got {vocab}")
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "tie_word_embeddings": tie,
        "max_position_embeddings": max_positions,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "dtype": "float32",
    }
    rng = np.random.default_rng(seed)
    shapes = _shapes(config)
    weights = {name: _random(rng, name, shape, scale) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "tokenizer.json", _byte_tokenizer(vocab))
    _write_json(directory / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE})
    return directory


def write_tiny_eagle(directory: Path, model_dir: Path, *, known: int = 100, **more: Any) -> Path:
    """Writes a random EAGLE-3 head for a tiny Llama, in the published format: of `known` of its tokens. `more`: fields
    of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((model_dir / "config.json").read_text()) | {"num_hidden_layers": 1, "draft_vocab_size": known}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False} | more
    hidden, rng = config["hidden_size"], np.random.default_rng(5)
    shapes = {
        name.replace("model.layers.0.", "midlayer."): (rows[0], 2 * hidden) if name.endswith(_JOINED) else rows
        for name, rows in _shapes(config).items()
        if name.startswith("model.layers.0.")
    }
    shapes |= {"midlayer.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (known, hidden)}
    tensors: dict[str, NDArray[Any]] = {name: _random(rng, name, shape, 1.0) for name, shape in shapes.items()}
    ids = np.sort(rng.permutation(config["vocab_size"])[:known])
    tensors |= {"d2t": ids - np.arange(known), "t2d": np.isin(np.arange(config["vocab_size"]), ids)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    return directory


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        linears = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden)}
        linears |= {"self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, query)}
        linears |= {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], scale: float) -> NDArray[np.float32]:
    if "norm" in name:
        return (1.0 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    if name.endswith(".bias"):
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)
    fan_in = shape[1]
    # The spread of the head. The layers must outweigh a tied embedding, which o_proj and down_proj ensure.
    gain = 3.0 * scale if name in ("lm_head.weight", "model.embed_tokens.weight") else 2.0
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        gain = 4.0
    spread: float = gain / math.sqrt(fan_in)
    return (spread * rng.standard_normal(shape)).astype(np.float32)


def _byte_tokenizer(vocab: int) -> dict[str, Any]:
    """A byte-level BPE `tokenizer.json` of exactly `vocab` tokens."""
    pieces = [*SPECIAL_TOKENS, *_byte_characters()]
    pairs = [(a, b) for a in string.ascii_letters for b in string.ascii_letters]
    triples = [(a + b, c) for a, b in pairs for c in string.ascii_letters]
    merges = (pairs + triples)[: vocab - len(pieces)]
    if len(merges) < vocab - len(pieces):
        raise ValueError(f"vocab: expected at most {len(pieces) + len(pairs) + len(triples)}, got {vocab}")
    pieces += [a + b for a, b in merges]
    return BytePairTokenizer(pieces, merges, special=range(len(SPECIAL_TOKENS))).to_json()


def _byte_characters() -> list[str]:
    """The printable character for each byte in GPT-2's byte-level BPE."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [stand_ins.get(byte, chr(byte)) for byte in range(256)]


def random_prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    """Token ids that depend only on the arguments."""
    rng = np.random.default_rng((length, vocab, seed))
    return [int(token) for token in rng.integers(0, vocab, length)]
