"""Products in eight bits with torch's library kernels: `_scaled_mm` for fp8 and `_int_mm` for int8.

Weights have one scale per output, inputs one per token, computed on the fly. Sums of int8 products are exact.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError
from tandem.model.fp8 import FP8, LARGEST_FP8, to_fp8

LARGEST: Final = {torch.int8: 127.0, FP8: LARGEST_FP8}
_FIRST_WITH_FP8: Final = (8, 9)  # compute capability
_ALIGNED: Final = 16  # both sizes of a matrix are multiples of this
_ROWS: Final = 32  # cuBLAS needs at least 17 int8 rows, and gave wrong results for some odd numbers
_TOLERANCE: Final = 0.02  # relative to a row's norm; differences in rounding stay below it

logger = logging.getLogger(__name__)


class QuantiseRows(Protocol):
    def __call__(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x [rows, width] → values of `dtype` [rows, width], and the fp32 scale [rows, 1] of each row."""
        ...


def quantised_rows(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`QuantiseRows` with torch: symmetric, round to nearest. `largest` [rows] is of whole rows, of which x may be a
    part."""
    wide = x.float()
    most = wide.abs().amax(dim=1) if largest is None else largest
    scales = (most / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    values = wide / scales
    return (to_fp8(values) if dtype == FP8 else values.round().to(dtype)), scales


@dataclass(frozen=True, slots=True)
class Fp8:
    """values fp8 [out, in], scales fp32 [1, out], bias [out]"""

    values: Tensor
    scales: Tensor
    bias: Tensor | None
    quantise: QuantiseRows

    def __call__(self, x: Tensor) -> Tensor:
        rows, worth = self.quantise(x, FP8)
        return torch._scaled_mm(
            rows, self.values.t(), scale_a=worth, scale_b=self.scales, bias=self.bias, out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8:
    """values int8 [out, in], scales fp32 [1, out], bias [out]"""

    values: Tensor
    scales: Tensor
    bias: Tensor | None
    quantise: QuantiseRows

    def __call__(self, x: Tensor) -> Tensor:
        rows, worth = self.quantise(x, torch.int8)
        sums = torch._int_mm(F.pad(rows, (0, 0, 0, -len(rows) % _ROWS)), self.values.t())[: len(rows)]
        y = (sums * worth * self.scales).to(x.dtype)
        return y if self.bias is None else y + self.bias


def device_matrix(
    weight: Tensor, bias: Tensor | None, largest: Tensor | None, dtype: torch.dtype, quantise: QuantiseRows
) -> Fp8 | Int8:
    """weight [out, in] in int8 or fp8; `largest` as in `quantised_rows`. Raises ConfigError naming the sizes."""
    if weight.shape[0] % _ALIGNED or weight.shape[1] % _ALIGNED:
        raise ConfigError(
            f"engine.weights: expected matrix sizes divisible by {_ALIGNED} on each rank, got "
            f"{weight.shape[0]} x {weight.shape[1]}: set another tp, or dense",
            field="engine.weights",
        )
    values, scales = quantised_rows(weight, dtype, largest)
    return (Fp8 if dtype == FP8 else Int8)(values, scales.t().contiguous(), bias, quantise)


def checked_rows(dtype: torch.dtype, device: torch.device, x_dtype: torch.dtype) -> QuantiseRows:
    """The best way to quantise inputs of `x_dtype` on a GPU for matrices of `dtype`.

    Raises ConfigError if this GPU, or torch on it, cannot multiply such matrices.
    """
    if dtype == FP8 and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        needed = ".".join(map(str, _FIRST_WITH_FP8))
        raise ConfigError(
            f"engine.weights: fp8 needs a GPU of compute capability {needed} or more, got "
            f"{torch.cuda.get_device_name(device)}: set int8 or dense",
            field="engine.weights",
        )
    wrong = product_error(quantised_rows, dtype, device, x_dtype)
    if wrong is not None:
        raise ConfigError(
            f"engine.weights: {dtype} gives wrong results on this GPU ({wrong}): set dense", field="engine.weights"
        )
    if importlib.util.find_spec("triton") is None:
        return quantised_rows
    ours: QuantiseRows = importlib.import_module("tandem.model.triton_ops").quantised_rows
    wrong = product_error(ours, dtype, device, x_dtype)
    if wrong is None:
        return ours
    logger.warning("quantising inputs with torch, more slowly than Triton: %s", wrong)
    return quantised_rows


def product_error(quantise: QuantiseRows, dtype: torch.dtype, device: torch.device, x_dtype: torch.dtype) -> str | None:
    """The error of a product against the dequantised one, for few and many rows; None if it is correct."""
    generator = torch.Generator(device).manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=x_dtype)

    weight, bias = some(48, 1520), some(48)
    values, scales = quantised_rows(weight, dtype)
    try:
        multiply = device_matrix(weight, bias, None, dtype, quantise)
        differences = []
        for count in (1, 33):
            x = some(count, 1520)
            rows, worth = quantised_rows(x, dtype)
            right = (rows.float() * worth) @ (values.float() * scales).t() + bias.float()
            differences.append(((multiply(x).float() - right).norm(dim=1) / right.norm(dim=1)).max())
        worst = float(torch.stack(differences).max())  # NaN if any is
    except Exception as error:  # no such kernel for this GPU, no compiler, or an old driver
        return f"{type(error).__name__}: {error}"
    return None if worst < _TOLERANCE else f"results differ by {worst:.3g} of their norm"
