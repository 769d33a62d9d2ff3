"""Weight matrices in the form they are multiplied in: dense, packed for native kernels, or in eight bits for a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError
from tandem.model.device_matrices import QuantiseRows, device_matrix, quantised_rows
from tandem.model.fp8 import FP8
from tandem.native.library import GROUP, Kernels

Packed = TypeVar("Packed")


class Weights(StrEnum):
    """Formats of projections. Embeddings and norms keep their dtype."""

    DENSE = "dense"  # in the engine's dtype
    INT8 = "int8"  # one scale per output
    INT4 = "int4"  # scale and minimum per group of an output's inputs; the output head is int8
    FP8 = "fp8"  # one scale per output

    @property
    def row_dtype(self) -> torch.dtype | None:
        """The element type of formats with one scale per output."""
        return {Weights.INT8: torch.int8, Weights.FP8: FP8}.get(self)


class Matrix(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] → [tokens, out]"""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """weight [out, in], bias [out]. `kernels`, if any, are used for as many rows as they are faster for."""

    weight: Tensor
    bias: Tensor | None = None
    kernels: Kernels | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernels is not None and x.shape[0] <= self.kernels.most_dense_rows:
            return self.kernels.linear_dense(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Native(Generic[Packed]):
    """Products whose order of summation does not depend on the batch.

    One sum in fp32; or, with rows quantised one by one, sums of integers (int8: one; int4: one per group of inputs,
    which are then added).
    """

    multiply: Callable[[Tensor, Packed, Tensor | None], Tensor]
    matrix: Packed
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.matrix, self.bias)


@dataclass(frozen=True, slots=True)
class MatrixMaker:
    """Args: `kernels` None: torch's products; with eight bits, `quantise` quantises the inputs. `batch_invariant`: a
    row's result is the same in any batch."""

    weights: Weights = Weights.DENSE
    kernels: Kernels | None = None
    batch_invariant: bool = False
    quantise: QuantiseRows = quantised_rows

    @property
    def quantises(self) -> bool:
        return self.weights is not Weights.DENSE

    @property
    def is_native(self) -> bool:
        """Whether our kernels compute all products."""
        if self.kernels is None:
            return False
        return self.quantises or self.batch_invariant or math.isinf(self.kernels.most_dense_rows)

    @property
    def of_vocabulary(self) -> MatrixMaker:
        """A maker for the output head, whose errors nothing corrects. Native kernels keep more than eight bits of its
        inputs."""
        if not self.quantises:
            return self
        return replace(self, weights=Weights.DENSE if self.kernels is None else Weights.INT8)

    def keep(self, weight: Tensor) -> Tensor:
        """In memory that is quick to read."""
        return weight if self.kernels is None else self.kernels.pages.keep(weight)

    def __call__(self, weight: Tensor, bias: Tensor | None = None, largest: Tensor | None = None) -> Matrix:
        """weight [out, in], bias [out]. `largest` [out] is the largest magnitude of each whole row, of which `weight`
        may be a rank's part."""
        if self.kernels is None:
            return self._by_torch(weight, bias, largest)
        if not self.quantises and not self.batch_invariant:
            return Dense(self.keep(weight), bias, self.kernels)
        padded = None if bias is None else self.kernels.padded_bias(bias)
        if not self.quantises:
            return Native(self.kernels.linear_float32, self.kernels.pack_float32(weight), padded)
        if self.weights is Weights.INT4:
            return Native(self.kernels.linear_int4, self.kernels.pack_int4(*quantised_int4(weight)), padded)
        if self.weights is Weights.INT8:
            values, scales = quantised_int8(weight, largest)
            return Native(self.kernels.linear_int8, self.kernels.pack_int8(values, scales), padded)
        raise ConfigError("engine.kernels: fp8 products need torch's kernels")

    def _by_torch(self, weight: Tensor, bias: Tensor | None, largest: Tensor | None) -> Matrix:
        if not self.quantises and not self.batch_invariant:
            return Dense(weight, bias)
        dtype = self.weights.row_dtype
        if dtype is None or self.batch_invariant:
            raise ConfigError("engine.kernels: int4 and batch-invariant products need the native kernels")
        return device_matrix(weight, bias, largest, dtype, self.quantise)


def quantised_int8(weight: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight fp32 [out, in] → values int8 within ±127 [out, in], scales fp32 [out]: symmetric, round to nearest."""
    values, scales = quantised_rows(weight, torch.int8, largest)
    return values, scales.squeeze(1)


def quantised_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight fp32 [out, in] → values uint8 of 0 to 15 [out, in], scales and minima fp16 [out, groups of GROUP inputs].

    They span a group's smallest to its largest weight. Weights from Q4_1 in a GGUF file are reproduced exactly.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP)
    padded = weight
    if inputs % GROUP:  # repeats the last column, which widens no group
        padded = torch.cat((weight, weight[:, -1:].expand(-1, groups * GROUP - inputs)), dim=1)
    grouped = padded.view(outputs, groups, GROUP)
    least = grouped.amin(dim=2).half()
    scales = ((grouped.amax(dim=2) - least) / 15).half()
    step = scales.float().clamp_min(torch.finfo(torch.float16).tiny).unsqueeze(2)
    values = ((grouped - least.float().unsqueeze(2)) / step).round().clamp(0, 15).to(torch.uint8)
    return values.view(outputs, -1)[:, :inputs], scales, least
