"""A checkpoint's rotary position embedding, read from its `config.json`. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.checkpoint.json_fields import JsonFields

DEFAULT_THETA = 10_000.0


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


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071). Interpolates by a pair's number of turns over the original context.

    Pairs with at most `beta_slow` turns are divided by `factor`; those with at least `beta_fast` are kept. cos and sin
    are multiplied by `attention_factor`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_tokens: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency has its own divisor.

    `long_factors` apply if contexts longer than the original are served. cos and sin are multiplied by
    `attention_factor`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_tokens: int
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`dims`: number of rotated dimensions per head; the rest are unchanged."""

    theta: float
    dims: int
    scaling: RopeScaling | None = None


def read_rope(config: JsonFields, head_dim: int, *, theta: float = DEFAULT_THETA) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (earlier). `theta` is the
    default."""
    field = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    if not config.has(field):
        return RopeConfig(config.positive_float("rope_theta", default=theta), _dims(config, head_dim))
    return read_rope_part(config, config.part(field), head_dim, theta=theta)


def read_rope_part(config: JsonFields, rope: JsonFields, head_dim: int, *, theta: float = DEFAULT_THETA) -> RopeConfig:
    """Reads one parameter object; missing fields are looked up in the enclosing config."""
    theta = (rope if rope.has("rope_theta") else config).positive_float("rope_theta", default=theta)
    dims = _dims(rope if rope.has("partial_rotary_factor") else config, head_dim)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta, dims)
    if kind == "linear":
        return RopeConfig(theta, dims, LinearScaling(rope.positive_float("factor")))
    if kind == "llama3":
        return RopeConfig(theta, dims, _llama3(rope))
    if kind == "yarn":
        return RopeConfig(theta, dims, _yarn(config, rope))
    if kind in ("longrope", "su"):
        return RopeConfig(theta, dims, _longrope(config, rope, dims))
    raise rope.wrong("rope_type", "default, linear, llama3, yarn or longrope", kind)


def _dims(holder: JsonFields, head_dim: int) -> int:
    share = holder.positive_float("partial_rotary_factor", default=1.0)
    dims = int(head_dim * share)
    if share > 1 or dims < 2 or dims % 2:
        expected = f"a share of head_dim ({head_dim}) that gives an even number"
        raise holder.wrong("partial_rotary_factor", expected, share)
    return dims


def _llama3(rope: JsonFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.positive_float("factor"),
        low_freq_factor=rope.positive_float("low_freq_factor"),
        high_freq_factor=rope.positive_float("high_freq_factor"),
        original_max_position_tokens=rope.positive_int("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.wrong("high_freq_factor", "more than low_freq_factor", scaling.high_freq_factor)
    return scaling


def _yarn(config: JsonFields, rope: JsonFields) -> YarnScaling:
    for field in ("mscale", "mscale_all_dim"):
        if rope.has(field):
            raise rope.wrong(field, "none (only DeepSeek's models use it)", rope.values[field])
    factor = rope.positive_float("factor")
    return YarnScaling(
        factor=factor,
        beta_fast=rope.positive_float("beta_fast", default=32.0),
        beta_slow=rope.positive_float("beta_slow", default=1.0),
        original_max_position_tokens=_original_context(config, rope),
        attention_factor=rope.positive_float(
            "attention_factor", default=0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        ),
        truncate=rope.boolean("truncate", default=True),
    )


def _longrope(config: JsonFields, rope: JsonFields, dims: int) -> LongRopeScaling:
    original = _original_context(config, rope)
    factor = rope.optional_float("factor") or config.positive_int("max_position_embeddings") / original
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factors=rope.positive_floats("short_factor", dims // 2),
        long_factors=rope.positive_floats("long_factor", dims // 2),
        original_max_position_tokens=original,
        attention_factor=rope.positive_float("attention_factor", default=default),
    )


def _original_context(config: JsonFields, rope: JsonFields) -> int:
    """Phi-3 stores it beside the parameters, other models among them."""
    field = "original_max_position_embeddings"
    for holder in (config, rope):
        if holder.has(field):
            return holder.positive_int(field)
    return config.positive_int("max_position_embeddings")
