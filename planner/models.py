"""Model shapes, by name or from a checkpoint's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from planner.shapes import ExpertShape, LatentShape, ModelShape, WindowShape
from tandem.checkpoint.model_config import ModelConfig
from tandem.config.engine import EngineSpec
from tandem.errors import ConfigError
from tandem.kvcache.layout import DTYPE_BYTES

MXFP4 = 0.53125  # bytes of an element: four bits, and eight for each block of 32


@dataclass(frozen=True, slots=True)
class KnownExperts:
    """`rows`: of one expert's gate and up projection. `shared`: experts of that size that each token uses too. `dense`:
    layers that have an MLP instead. `weight_bytes`: as published, if other than the rest."""

    count: int
    per_token: int
    rows: int
    shared: int = 0
    dense: int = 0
    weight_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class KnownLatent:
    """The fields of DeepSeek's `config.json`. A head's key has `nope` elements and `rope` rotated ones."""

    query_rank: int
    rank: int
    nope: int = 128
    rope: int = 64
    value: int = 128


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The fields of the checkpoint's `config.json`. The MLP is gated. `weight_bytes`: as published, if other than those
    of activations. `gap`: what Tandem's engine lacks to serve it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int | None = None
    context_tokens: int = 8192
    experts: KnownExperts | None = None
    latent: KnownLatent | None = None
    window: WindowShape | None = None
    ties: bool = False
    weight_bytes: float | None = None
    gap: str | None = None


_SINKS = "attention sinks"
_LATENT = "multi-head latent attention"
_DEEPSEEK = KnownModel(
    61, 7168, 128, 1, 18_432, 129_280, context_tokens=163_840, experts=KnownExperts(256, 8, 2048, shared=1, dense=3),
    latent=KnownLatent(1536, 512), weight_bytes=1.0, gap=_LATENT,
)  # fmt: skip

_LLAMA_8B = KnownModel(32, 4096, 32, 8, 14_336, 128_256, context_tokens=131_072)
_LLAMA_70B = KnownModel(80, 8192, 64, 8, 28_672, 128_256, context_tokens=131_072)
_LLAMA_405B = KnownModel(126, 16_384, 128, 8, 53_248, 128_256, context_tokens=131_072)

# Contexts are those of the published config.json, of Qwen2.5 those of its instruct checkpoints.
KNOWN = {
    "smollm2-135m": KnownModel(30, 576, 9, 3, 1536, 49_152, ties=True),
    "llama-2-7b": KnownModel(32, 4096, 32, 32, 11_008, 32_000, context_tokens=4096),
    "llama-2-13b": KnownModel(40, 5120, 40, 40, 13_824, 32_000, context_tokens=4096),
    "llama-2-70b": KnownModel(80, 8192, 64, 8, 28_672, 32_000, context_tokens=4096),
    "llama-3-8b": _LLAMA_8B,  # of Llama 3.1; the first Llama 3 has the name of its checkpoints
    "llama-3-70b": _LLAMA_70B,
    "llama-3-405b": _LLAMA_405B,
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.1-405b": _LLAMA_405B,
    "meta-llama-3-8b": replace(_LLAMA_8B, context_tokens=8192),
    "meta-llama-3-70b": replace(_LLAMA_70B, context_tokens=8192),
    "mistral-7b": KnownModel(32, 4096, 32, 8, 14_336, 32_768, context_tokens=32_768),
    "qwen2.5-7b": KnownModel(28, 3584, 28, 4, 18_944, 152_064, context_tokens=32_768),
    "qwen2.5-32b": KnownModel(64, 5120, 40, 8, 27_648, 152_064, context_tokens=32_768),
    "qwen3-32b": KnownModel(64, 5120, 64, 8, 25_600, 151_936, head_dim=128, context_tokens=40_960),
    "qwen2.5-72b": KnownModel(80, 8192, 64, 8, 29_568, 152_064, context_tokens=32_768),
    "mixtral-8x7b": KnownModel(32, 4096, 32, 8, 14_336, 32_000, None, 32_768, KnownExperts(8, 2, 14_336)),
    "mixtral-8x22b": KnownModel(56, 6144, 48, 8, 16_384, 32_768, None, 65_536, KnownExperts(8, 2, 16_384)),
    "qwen3-30b-a3b": KnownModel(48, 2048, 32, 4, 6144, 151_936, 128, 40_960, KnownExperts(128, 8, 768)),
    "qwen3-235b-a22b": KnownModel(94, 4096, 64, 4, 12_288, 151_936, 128, 40_960, KnownExperts(128, 8, 1536)),
    "minimax-m2": KnownModel(
        62, 3072, 48, 8, 1536, 200_064, 128, 196_608, KnownExperts(256, 8, 1536), weight_bytes=1.0,
        gap="its router of experts",
    ),
    "gpt-oss-20b": KnownModel(
        24, 2880, 64, 8, 2880, 201_088, 64, 131_072, KnownExperts(32, 4, 2880, weight_bytes=MXFP4),
        window=WindowShape(12, 128), gap=_SINKS,
    ),
    "gpt-oss-120b": KnownModel(
        36, 2880, 64, 8, 2880, 201_088, 64, 131_072, KnownExperts(128, 4, 2880, weight_bytes=MXFP4),
        window=WindowShape(18, 128), gap=_SINKS,
    ),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "kimi-k2": KnownModel(
        61, 7168, 64, 1, 18_432, 163_840, context_tokens=131_072, experts=KnownExperts(384, 8, 2048, shared=1, dense=1),
        latent=KnownLatent(1536, 512), weight_bytes=1.0, gap=_LATENT,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """`resident_params`: all parameters in memory, embeddings included. `parts`: what the ranks of a worker divide
    among them besides heads. `gap`: what Tandem's engine lacks to serve the model."""

    name: str
    shape: ModelShape
    resident_params: int
    context_tokens: int
    parts: tuple[int, ...]
    gap: str | None = None

    @property
    def resident_bytes(self) -> float:
        """Of all weights in memory. Embeddings stay as wide as activations, and the output head too; a CPU, which has
        activations of four bytes, keeps a head in eight bits beside them."""
        shape, experts = self.shape, 0.0
        vocabulary = self.resident_params - shape.block_params
        if shape.experts is not None:
            experts = shape.experts.all_params * shape.experts.weight_bytes
            vocabulary -= shape.experts.all_params
        wide = max(shape.weight_bytes, shape.activation_bytes)
        of_vocabulary = vocabulary * wide
        if shape.weight_bytes < wide == 4.0:
            of_vocabulary = shape.head_params * (wide + 1.0)
        return shape.block_params * shape.weight_bytes + of_vocabulary + experts

    def fits_tp(self, tp: int) -> bool:
        """Like ModelConfig.fits_tp: whole heads, MLP rows and experts on each rank, KV heads whole or replicated."""
        if tp < 1 or self.shape.heads % tp or any(count % tp for count in self.parts):
            return False
        return self.shape.kv_heads % tp == 0 or tp % self.shape.kv_heads == 0

    def fitting_tps(self) -> list[int]:
        return [tp for tp in range(1, self.shape.heads + 1) if self.fits_tp(tp)]


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes of one element. `weights`, `experts` None: of those that the model is published with; else weights are as
    activations, and those of experts as others."""

    weights: float | None = None
    kv: float = 2.0
    activations: float = 2.0
    experts: float | None = None


def engine_bytes(engine: EngineSpec) -> tuple[float, float, float]:
    """Of an element of its weights, its KV and its activations."""
    wide = float(DTYPE_BYTES[engine.dtype])
    weights = {"dense": wide, "int4": 0.625}.get(engine.weights, 1.0)
    return weights, wide if engine.kv_dtype == "auto" else 1.0, wide


def find_model(name: str, elements: ElementSizes = ElementSizes()) -> PlannedModel:
    """Finds a model by known name, checkpoint folder or config.json. Raises ConfigError, CheckpointError."""
    checkpoint = name.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    known = KNOWN.get(checkpoint) or KNOWN.get(checkpoint.removeprefix("meta-"))
    if known is not None:
        return _planned(name, known, elements)
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model: expected {', '.join(KNOWN)}, or a folder with a checkpoint's config.json, got {name!r}",
            field="--model",
        )
    return _planned(folder.name, _of_config(ModelConfig.load(folder)), elements)


def _of_config(config: ModelConfig) -> KnownModel:
    traits, experts = config.traits, None
    if (found := traits.experts) is not None:
        dense = found.sparse.count(False)
        experts = KnownExperts(found.count, found.per_token, found.expert_size, dense=dense)
    widths = [width for width in traits.windows if width is not None]
    return KnownModel(
        config.layers, config.hidden_size, config.heads, config.kv_heads, config.intermediate_size,
        config.vocab_size, config.head_dim, config.max_position_tokens, experts,
        window=WindowShape(len(widths), max(widths)) if widths else None, ties=config.tie_word_embeddings,
    )  # fmt: skip


def _planned(name: str, known: KnownModel, elements: ElementSizes) -> PlannedModel:
    head_dim = known.head_dim or known.hidden // known.heads
    mlp, sparse = 3 * known.hidden * known.intermediate, 0
    weight_bytes = elements.weights or known.weight_bytes or elements.activations
    block_params = known.layers * _attention_params(known, head_dim)
    experts, parts = None, (known.intermediate,)
    if (found := known.experts) is not None:
        sparse = known.layers - found.dense
        one = 3 * known.hidden * found.rows
        block_params += sparse * found.shared * one
        expert_bytes = elements.experts or found.weight_bytes or weight_bytes
        experts = ExpertShape(sparse, found.count, found.per_token, one, expert_bytes)
        parts = (found.count, *((known.intermediate,) if found.dense else ()))
    block_params += (known.layers - sparse) * mlp
    head_params = known.vocab * known.hidden
    latent = known.latent
    shape = ModelShape(
        known.layers, known.heads, known.kv_heads, head_dim, block_params, head_params,
        weight_bytes, elements.kv, elements.activations, known.hidden, experts,
        None if latent is None else LatentShape(latent.rank, latent.rope, latent.nope + latent.rope, latent.value),
        known.window,
    )  # fmt: skip
    resident = block_params + head_params * (1 if known.ties else 2) + (experts.all_params if experts else 0)
    return PlannedModel(name, shape, resident, known.context_tokens, parts, known.gap)


def _attention_params(known: KnownModel, head_dim: int) -> int:
    """Of one layer."""
    if (latent := known.latent) is None:
        return known.hidden * head_dim * 2 * (known.heads + known.kv_heads)
    queries = latent.query_rank * (known.hidden + known.heads * (latent.nope + latent.rope))
    latents = known.hidden * (latent.rank + latent.rope) + latent.rank * known.heads * (latent.nope + latent.value)
    return queries + latents + known.heads * latent.value * known.hidden
