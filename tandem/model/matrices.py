"""A weight matrix in the form it is multiplied in: dense, or packed for the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError
from tandem.native.library import Kernels, PackedFloat32, PackedInt8


class Weights(StrEnum):
    """How projections and the vocabulary's matrix are kept. Embeddings and norms stay as they are."""

    DENSE = "dense"  # in the engine's dtype
    INT8 = "int8"  # one scale for each output


class Matrix(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] → [tokens, out]"""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """weight [out, in], bias [out]"""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class NativeFloat32:
    """Every output is one sum in one order, whatever the batch."""

    kernels: Kernels
    matrix: PackedFloat32
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear_float32(x, self.matrix, self.bias)


@dataclass(frozen=True, slots=True)
class NativeInt8:
    """Sums of integers, rows quantised one by one: exact in any batch."""

    kernels: Kernels
    matrix: PackedInt8
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear_int8(x, self.matrix, self.bias)


@dataclass(frozen=True, slots=True)
class MatrixMaker:
    """Args: `kernels` None: torch's own products. `batch_invariant`: a row's result is the same in any batch."""

    weights: Weights = Weights.DENSE
    kernels: Kernels | None = None
    batch_invariant: bool = False

    @property
    def quantises(self) -> bool:
        return self.weights is not Weights.DENSE

    def __call__(self, weight: Tensor, bias: Tensor | None = None, largest: Tensor | None = None) -> Matrix:
        """weight [out, in], bias [out]. `largest` [out]: the largest magnitude of each whole row, of which `weight` may
        be a rank's part."""
        if self.kernels is None:
            if self.quantises or self.batch_invariant:
                raise ConfigError("engine.kernels: quantised and batch-invariant products need the native kernels")
            return Dense(weight, bias)
        if not self.quantises and not self.batch_invariant:
            return Dense(weight, bias)
        padded = None if bias is None else self.kernels.padded_bias(bias)
        if not self.quantises:
            return NativeFloat32(self.kernels, self.kernels.pack_float32(weight), padded)
        values, scales = quantised_int8(weight, largest)
        return NativeInt8(self.kernels, self.kernels.pack_int8(values, scales), padded)


def quantised_int8(weight: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight fp32 [out, in] → values int8 within ±127 [out, in], scales fp32 [out]: symmetric, to the nearest."""
    most = weight.abs().amax(dim=1) if largest is None else largest
    scales = (most / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scales.unsqueeze(1)).round().to(torch.int8), scales
