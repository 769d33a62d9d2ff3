"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split form Llama checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.model_config import LinearScaling, ModelConfig, RopeScaling

# cos [tokens, 1, head_dim] and sin with the first half negated: turning is then x · cos + swap(x) · sin.
Rotation = tuple[Tensor, Tensor]


class Rope:
    """The angles of a model. Made once; `rotation` is made once per step and used by every layer."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._inv_freq = scaled_frequencies(config.head_dim, config.rope_theta, config.rope_scaling).to(device)
        self._dtype = dtype

    def rotation(self, positions: Tensor) -> Rotation:
        """positions [tokens] → (cos, signed sin), each [tokens, 1, head_dim]; angles in fp32 whatever the dtype."""
        angles = torch.outer(positions.to(torch.float32), self._inv_freq)
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1).to(self._dtype),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(self._dtype),
        )


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [tokens, heads, head_dim], a strided view or not → the same shape, contiguous."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1).mul_(sin).addcmul_(x, cos)


def scaled_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair, [head_dim / 2], fp32."""
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return inv_freq
    if isinstance(scaling, LinearScaling):
        return inv_freq / scaling.factor
    # Llama 3.1: how many turns a pair makes over the original context decides whether it is stretched.
    turns = scaling.original_max_position_tokens * inv_freq / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq
