"""Model shapes, by name or from a checkpoint's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.cost import ModelShape
from tandem.checkpoint.model_config import ModelConfig
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The fields of the checkpoint's `config.json`. The MLP is gated."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int | None = None
    context_tokens: int = 8192


KNOWN = {
    "smollm2-135m": KnownModel(30, 576, 9, 3, 1536, 49_152),
    "llama-2-7b": KnownModel(32, 4096, 32, 32, 11_008, 32_000, context_tokens=4096),
    "llama-2-13b": KnownModel(40, 5120, 40, 40, 13_824, 32_000, context_tokens=4096),
    "llama-2-70b": KnownModel(80, 8192, 64, 8, 28_672, 32_000, context_tokens=4096),
    "llama-3-8b": KnownModel(32, 4096, 32, 8, 14_336, 128_256, context_tokens=131_072),
    "llama-3-70b": KnownModel(80, 8192, 64, 8, 28_672, 128_256, context_tokens=131_072),
    "llama-3-405b": KnownModel(126, 16_384, 128, 8, 53_248, 128_256, context_tokens=131_072),
    "mistral-7b": KnownModel(32, 4096, 32, 8, 14_336, 32_768, context_tokens=32_768),
    "qwen2.5-7b": KnownModel(28, 3584, 28, 4, 18_944, 152_064, context_tokens=131_072),
    "qwen2.5-32b": KnownModel(64, 5120, 40, 8, 27_648, 152_064, context_tokens=131_072),
    "qwen2.5-72b": KnownModel(80, 8192, 64, 8, 29_568, 152_064, context_tokens=131_072),
}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """`resident_params`: all parameters in memory, embeddings included."""

    name: str
    shape: ModelShape
    resident_params: int
    context_tokens: int
    kv_heads: int
    heads: int
    intermediate: int

    @property
    def weights_bytes(self) -> float:
        return self.resident_params * self.shape.weight_bytes

    def fits_tp(self, tp: int) -> bool:
        """Like ModelConfig.fits_tp: whole heads and MLP rows on each rank, KV heads whole or replicated."""
        if tp < 1 or self.heads % tp or self.intermediate % tp:
            return False
        return self.kv_heads % tp == 0 or tp % self.kv_heads == 0


def find_model(name: str, *, element_bytes: float = 2.0) -> PlannedModel:
    """Finds a model by known name, checkpoint folder or config.json. Raises ConfigError, CheckpointError."""
    known = KNOWN.get(name.rsplit("/", 1)[-1].lower().removesuffix("-instruct"))
    if known is not None:
        return _planned(name, known, element_bytes, tied=name.startswith("smollm"))
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model: expected {', '.join(KNOWN)}, or a folder with a checkpoint's config.json, got {name!r}",
            field="--model",
        )
    config = ModelConfig.load(folder)
    if config.traits.experts is not None:
        # A step reads the experts that its tokens choose: neither all parameters nor one token's share.
        raise ConfigError(
            f"--model: {name}: expected a dense model; models with experts are not supported yet", field="--model"
        )
    found = KnownModel(
        config.layers, config.hidden_size, config.heads, config.kv_heads, config.intermediate_size,
        config.vocab_size, config.head_dim, config.max_position_tokens,
    )  # fmt: skip
    return _planned(folder.name, found, element_bytes, tied=config.tie_word_embeddings)


def _planned(name: str, known: KnownModel, element_bytes: float, *, tied: bool) -> PlannedModel:
    head_dim = known.head_dim or known.hidden // known.heads
    attention = known.hidden * head_dim * 2 * (known.heads + known.kv_heads)
    block_params = known.layers * (attention + 3 * known.hidden * known.intermediate)
    head_params = known.vocab * known.hidden
    shape = ModelShape(
        known.layers, known.heads, known.kv_heads, head_dim, block_params, head_params, element_bytes, element_bytes
    )
    resident = block_params + head_params * (1 if tied else 2)
    return PlannedModel(name, shape, resident, known.context_tokens, known.kv_heads, known.heads, known.intermediate)
