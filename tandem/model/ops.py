"""Element-wise operations between products, by torch or by native kernels for supported sizes and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.checkpoint.model_families import Activation
from tandem.model.rope import Rotation, rotate
from tandem.native.library import LANES, Kernels

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


class Ops(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., width] → the same. The mean square is computed in fp32, and an fp32 weight is applied in fp32."""
        ...

    def rms_norm_of_sum(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + added, both [tokens, width], whose rows are dense, and the `rms_norm` of this sum."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[tokens, 2 · width], gates first → [tokens, width]"""
        ...

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[tokens, heads, head_dim], possibly strided → the same, rotated. May change `x`."""
        ...


@dataclass(frozen=True, slots=True)
class TorchOps:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)

    def rms_norm_of_sum(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + added
        return x, self.rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotate(x, rotation)


TORCH_OPS = TorchOps()


@dataclass(frozen=True, slots=True)
class NativeOps:
    """Native operations in fp32 on the CPU; torch's for unsupported sizes."""

    kernels: Kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.kernels.rms_norm(x, weight, eps)

    def rms_norm_of_sum(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + added
        return x, self.rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if gate_up.shape[1] % (2 * LANES):
            return TORCH_OPS.gated(gate_up, activation)
        return self.kernels.gated(gate_up, gelu=activation == "gelu_tanh")

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        if cos.shape[-1] % (2 * LANES) or x.stride(1) != x.shape[2] or x.stride(2) != 1:
            return rotate(x, rotation)
        self.kernels.rotate(x, cos, sin)
        return x


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native kernels support this dtype on this device."""
    return dtype == torch.float32 and device.type == "cpu"
