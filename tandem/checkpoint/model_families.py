"""What distinguishes an architecture besides its sizes: biases, norms, windows and experts, read from `config.json`.

One function per family; `tandem/model/families/` builds the matching layers. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from tandem.checkpoint.json_fields import JsonFields
from tandem.checkpoint.rope_config import DEFAULT_THETA, RopeConfig, read_rope, read_rope_part

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP, in the layers for which `sparse` is true.

    Args:
        expert_size: rows of one expert's gate and up projection.
        renormalise: scale the chosen experts' weights to sum to one.
    """

    count: int
    per_token: int
    expert_size: int
    renormalise: bool
    sparse: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Traits:
    """Defaults are Llama's.

    Args:
        windows: per layer, how many tokens a query sees, itself included; None: all before it.
        rope: rotation of queries and keys. window_rope: in layers with a window, if different.
        qk_norm: queries and keys are normalised per head before the rotation.
        norm_offset: added to each norm's stored weights.
        output_norms: the outputs of attention and MLP are normalised before the residual add.
        query_scale: factor of q·k; None: head_dim to the power of -1/2.
        attention_softcap, logits_softcap: c · tanh(x / c) of scores and logits.
    """

    windows: tuple[int | None, ...]
    rope: RopeConfig
    window_rope: RopeConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0
    output_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    experts: Experts | None = None

    @property
    def widest_window(self) -> int | None:
        """The largest window if every layer has one, else None. No layer reads keys farther back."""
        widths = [window for window in self.windows if window is not None]
        return max(widths) if len(widths) == len(self.windows) else None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that every family's config names alike."""

    layers: int
    hidden: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Family:
    """`ties` and `head_dim` are the family's defaults for a config without these fields."""

    traits: Callable[[JsonFields, Sizes], Traits]
    ties: bool = False
    head_dim: int | None = None


def _llama(config: JsonFields, sizes: Sizes) -> Traits:
    """Llama 2 and 3, SmolLM2."""
    bias = config.boolean("attention_bias")
    return replace(_plain(config, sizes), qkv_bias=bias, out_bias=bias, mlp_bias=config.boolean("mlp_bias"))


def _unknown(config: JsonFields, sizes: Sizes) -> Traits:
    """As far as it matters outside an engine."""
    return Traits(windows=(None,) * sizes.layers, rope=RopeConfig(DEFAULT_THETA, sizes.head_dim))


def _mistral(config: JsonFields, sizes: Sizes) -> Traits:
    """The first Mistral models have a window in every layer; later ones have none."""
    window = config.optional_int("sliding_window") if "sliding_window" in config.values else 4096
    return _windowed(config, sizes, window)


def _qwen2(config: JsonFields, sizes: Sizes) -> Traits:
    """Qwen2, Qwen2.5."""
    return replace(_plain(config, sizes), qkv_bias=True, windows=_qwen_windows(config, sizes))


def _qwen3(config: JsonFields, sizes: Sizes) -> Traits:
    bias = config.boolean("attention_bias")
    return replace(
        _plain(config, sizes), qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_qwen_windows(config, sizes)
    )


def _phi3(config: JsonFields, sizes: Sizes) -> Traits:
    """Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini."""
    return _windowed(config, sizes, config.optional_int("sliding_window"))


def _mixtral(config: JsonFields, sizes: Sizes) -> Traits:
    experts = Experts(
        count=config.positive_int("num_local_experts"),
        per_token=config.positive_int("num_experts_per_tok", default=2),
        expert_size=sizes.intermediate,
        renormalise=True,
        sparse=(True,) * sizes.layers,
    )
    return replace(
        _windowed(config, sizes, config.optional_int("sliding_window")),
        rope=read_rope(config, sizes.head_dim, theta=1_000_000.0),
        experts=_checked(config, experts),
    )


def _qwen3_moe(config: JsonFields, sizes: Sizes) -> Traits:
    if config.boolean("use_sliding_window"):
        raise config.wrong("use_sliding_window", "false for Qwen3MoeForCausalLM", True)
    step, dense = config.positive_int("decoder_sparse_step", default=1), config.counts("mlp_only_layers")
    bias = config.boolean("attention_bias")
    experts = Experts(
        count=config.positive_int("num_experts" if config.has("num_experts") else "num_local_experts"),
        per_token=config.positive_int("num_experts_per_tok", default=8),
        expert_size=config.positive_int("moe_intermediate_size"),
        renormalise=config.boolean("norm_topk_prob"),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(sizes.layers)),
    )
    return replace(_plain(config, sizes), qkv_bias=bias, out_bias=bias, qk_norm=True, experts=_checked(config, experts))


def _gemma2(config: JsonFields, sizes: Sizes) -> Traits:
    return replace(
        _gemma(config, sizes, every=2),
        rope=read_rope(config, sizes.head_dim),
        attention_softcap=config.optional_float("attn_logit_softcapping"),
        logits_softcap=config.optional_float("final_logit_softcapping"),
    )


def _gemma3(config: JsonFields, sizes: Sizes) -> Traits:
    whole, local = _gemma3_ropes(config, sizes.head_dim)
    return replace(
        _gemma(config, sizes, every=config.positive_int("sliding_window_pattern", default=6)),
        rope=whole,
        window_rope=local,
        qk_norm=True,
        attention_softcap=config.optional_float("attn_logit_softcapping"),
        logits_softcap=config.optional_float("final_logit_softcapping"),
    )


def _gemma(config: JsonFields, sizes: Sizes, *, every: int) -> Traits:
    """Shared by Gemma 2 and 3. Every `every`-th layer has full attention."""
    if config.boolean("use_bidirectional_attention"):
        raise config.wrong("use_bidirectional_attention", "false (the model answers left to right)", True)
    bias = config.boolean("attention_bias")
    window = config.positive_int("sliding_window", default=4096)
    return Traits(
        windows=_typed_windows(config, sizes, window, lambda layer: (layer + 1) % every != 0),
        rope=RopeConfig(DEFAULT_THETA, sizes.head_dim),
        qkv_bias=bias,
        out_bias=bias,
        activation=_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
        output_norms=True,
        embedding_scale=sizes.hidden**0.5,
        query_scale=config.positive_float("query_pre_attn_scalar", default=256.0) ** -0.5,
    )


def _gemma3_ropes(config: JsonFields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """(full-attention layers, window layers), in the form of transformers 5 or of earlier versions."""
    rope = config.part("rope_parameters") if config.has("rope_parameters") else None
    if rope is not None and rope.has("full_attention"):
        return (
            read_rope_part(config, rope.part("full_attention"), head_dim),
            read_rope_part(config, rope.part("sliding_attention"), head_dim),
        )
    whole = read_rope(config, head_dim, theta=1_000_000.0)
    return whole, RopeConfig(config.positive_float("rope_local_base_freq", default=DEFAULT_THETA), head_dim)


def _plain(config: JsonFields, sizes: Sizes) -> Traits:
    return Traits(
        windows=(None,) * sizes.layers,
        rope=read_rope(config, sizes.head_dim),
        activation=_activation(config, "hidden_act", "silu"),
    )


def _windowed(config: JsonFields, sizes: Sizes, window: int | None) -> Traits:
    return replace(_plain(config, sizes), windows=(window,) * sizes.layers)


def _activation(config: JsonFields, field: str, default: str) -> Activation:
    named = config.values.get(field) or default
    if not isinstance(named, str) or named not in _ACTIVATIONS:
        raise config.wrong(field, f"one of {', '.join(_ACTIVATIONS)}", named)
    return _ACTIVATIONS[named]


def _qwen_windows(config: JsonFields, sizes: Sizes) -> tuple[int | None, ...]:
    if not config.boolean("use_sliding_window"):
        return (None,) * sizes.layers
    first = min(config.counts("max_window_layers"), default=sizes.layers)
    window = config.positive_int("sliding_window", default=4096)
    return _typed_windows(config, sizes, window, lambda layer: layer >= first)


def _typed_windows(
    config: JsonFields, sizes: Sizes, window: int, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Windows by `layer_types` if the config has it, otherwise by the family's rule."""
    types = config.values.get("layer_types")
    if types is None:
        return tuple(window if slides(layer) else None for layer in range(sizes.layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(types, list) or len(types) != sizes.layers or any(each not in known for each in types):
        raise config.wrong("layer_types", f"{sizes.layers} times full_attention or sliding_attention", types)
    return tuple(known[each] for each in types)


def _checked(config: JsonFields, experts: Experts) -> Experts:
    if experts.per_token > experts.count:
        raise config.wrong("num_experts_per_tok", f"at most the number of experts ({experts.count})", experts.per_token)
    return experts


PLAIN = Family(_unknown)
# What the text part of a config may leave out, by its `model_type`: LLaVA 1.5 and 1.6 do.
_OF_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
TEXT_DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama": {**_OF_7B, "intermediate_size": 11008, "max_position_embeddings": 2048},
        "mistral": {
            **_OF_7B,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
        },
    }
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(_llama),
        "MistralForCausalLM": Family(_mistral),
        "Qwen2ForCausalLM": Family(_qwen2),
        "Qwen3ForCausalLM": Family(_qwen3, head_dim=128),
        "Qwen3MoeForCausalLM": Family(_qwen3_moe),
        "Gemma2ForCausalLM": Family(_gemma2, ties=True, head_dim=256),
        "Gemma3ForCausalLM": Family(_gemma3, ties=True, head_dim=256),
        "Phi3ForCausalLM": Family(_phi3),
        "MixtralForCausalLM": Family(_mixtral),
    }
)
