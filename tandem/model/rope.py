"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split form of checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.checkpoint.rope_config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling

# cos [tokens, 1, dims], and sin with its first half negated: the rotation is x · cos + swap(x) · sin.
Rotation = tuple[Tensor, Tensor]


_PAGE_TOKENS = 1024


class Rope:
    """The angles of a model. `rotation` is computed once per step and used by every layer.

    On the CPU, cosines and sines up to the highest position so far are cached, in pages of fixed size, so they do not
    depend on the batch.

    Args:
        max_tokens: longest served context, which selects one of LongRoPE's two sets of factors.
    """

    def __init__(self, config: RopeConfig, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self._inv_freq = scaled_frequencies(config, max_tokens).to(device)
        scaled = isinstance(config.scaling, YarnScaling | LongRopeScaling)
        self._gain = config.scaling.attention_factor if scaled else 1.0  # type: ignore[union-attr]
        self._dtype = dtype
        self._table: Rotation | None = None

    def rotation(self, positions: Tensor) -> Rotation:
        """positions [tokens] → (cos, signed sin), each [tokens, 1, dims]; angles are in fp32 for any dtype."""
        if positions.device.type != "cpu":
            return self._angles(positions)
        needed = int(positions.max()) + 1
        known = 0 if self._table is None else self._table[0].shape[0]
        if needed > known:
            first, last = known // _PAGE_TOKENS, -(-needed // _PAGE_TOKENS)
            pages = [self._angles(torch.arange(_PAGE_TOKENS) + page * _PAGE_TOKENS) for page in range(first, last)]
            both = pages if self._table is None else [self._table, *pages]
            self._table = (torch.cat([cos for cos, _ in both]), torch.cat([sin for _, sin in both]))
        cos, sin = self._table  # type: ignore[misc]  # there is at least one position
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _angles(self, positions: Tensor) -> Rotation:
        angles = torch.outer(positions.to(torch.float32), self._inv_freq)
        cos, sin = angles.cos() * self._gain, angles.sin() * self._gain
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1).to(self._dtype),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(self._dtype),
        )


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [tokens, heads, head_dim], possibly strided → the same, contiguous, with the first `dims` of each head
    rotated."""
    cos, sin = rotation
    dims = cos.shape[-1]
    turning = x[..., :dims]
    first, second = turning.chunk(2, dim=-1)
    turned = torch.cat((second, first), dim=-1).mul_(sin).addcmul_(turning, cos)
    return turned if dims == x.shape[-1] else torch.cat((turned, x[..., dims:]), dim=-1)


def scaled_frequencies(config: RopeConfig, max_tokens: int) -> Tensor:
    """Radians per position of each pair, [dims / 2], fp32."""
    inv_freq = 1.0 / config.theta ** (torch.arange(0, config.dims, 2, dtype=torch.float32) / config.dims)
    scaling = config.scaling
    if scaling is None:
        return inv_freq
    if isinstance(scaling, LinearScaling):
        return inv_freq / scaling.factor
    if isinstance(scaling, LongRopeScaling):
        long = max_tokens > scaling.original_max_position_tokens
        return inv_freq / torch.tensor(scaling.long_factors if long else scaling.short_factors)
    kept = _kept_llama3(scaling, inv_freq) if isinstance(scaling, Llama3Scaling) else _kept_yarn(scaling, config)
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq


def _kept_llama3(scaling: Llama3Scaling, inv_freq: Tensor) -> Tensor:
    """Keeps part of a pair's frequency, by its number of turns over the original context."""
    turns = scaling.original_max_position_tokens * inv_freq / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_yarn(scaling: YarnScaling, config: RopeConfig) -> Tensor:
    """The same, as a ramp over the pairs' indices."""

    def pair(turns: float) -> float:
        context = scaling.original_max_position_tokens
        return config.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    ramp = (torch.arange(config.dims // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0.0, 1.0)
