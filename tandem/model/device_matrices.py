"""Products in eight bits by torch's own library kernels: weights have one scale for each output, and inputs get one for
each token as they come. By `_scaled_mm` in fp8 and `_int_mm` in int8; the sum of int8 products is exact.
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
_ALIGNED: Final = 16  # of both sizes of a matrix
_ROWS: Final = 32  # cuBLAS takes no fewer than 17 rows of int8, and some odd numbers it got wrong
_TOLERANCE: Final = 0.02  # of a row's size; a rounding that goes the other way here and there makes less

logger = logging.getLogger(__name__)


class QuantiseRows(Protocol):
    def __call__(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x [rows, width] → values of `dtype` [rows, width], and fp32 [rows, 1], what one unit of each row is worth."""
        ...


def quantised_rows(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`QuantiseRows` by torch: symmetric, to the nearest. `largest` [rows]: of whole rows, of which x may be a part."""
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
    """weight [out, in] in int8 or fp8; `largest` as of `quantised_rows`. Raises ConfigError naming the sizes."""
    if weight.shape[0] % _ALIGNED or weight.shape[1] % _ALIGNED:
        raise ConfigError(
            f"engine.weights: expected matrices of multiples of {_ALIGNED} in both directions on a rank, got "
            f"{weight.shape[0]} x {weight.shape[1]}: set another tp, or dense",
            field="engine.weights",
        )
    values, scales = quantised_rows(weight, dtype, largest)
    return (Fp8 if dtype == FP8 else Int8)(values, scales.t().contiguous(), bias, quantise)


def checked_rows(dtype: torch.dtype, device: torch.device, x_dtype: torch.dtype) -> QuantiseRows:
    """How inputs of `x_dtype` are best quantised on a GPU for matrices of `dtype`.

    Raises ConfigError: this GPU, or torch on it, does not multiply such matrices.
    """
    if dtype == FP8 and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        needed = ".".join(map(str, _FIRST_WITH_FP8))
        raise ConfigError(
            f"engine.weights: fp8 needs a GPU of compute capability {needed} or more, got "
            f"{torch.cuda.get_device_name(device)}: set int8 or dense",
            field="engine.weights",
        )
    wrong = fault(quantised_rows, dtype, device, x_dtype)
    if wrong is not None:
        raise ConfigError(f"engine.weights: {dtype} is wrong on this GPU: {wrong}: set dense", field="engine.weights")
    if importlib.util.find_spec("triton") is None:
        return quantised_rows
    ours: QuantiseRows = importlib.import_module("tandem.model.triton_ops").quantised_rows
    wrong = fault(ours, dtype, device, x_dtype)
    if wrong is None:
        return ours
    logger.warning("torch quantises inputs, more slowly: Triton: %s", wrong)
    return quantised_rows


def fault(quantise: QuantiseRows, dtype: torch.dtype, device: torch.device, x_dtype: torch.dtype) -> str | None:
    """How a product differs from that of the widened numbers, for few and many rows; None when it does not."""
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
        worst = float(torch.stack(differences).max())  # which is NaN where one is
    except Exception as error:  # no such kernel for this GPU, no compiler, an old driver
        return f"{type(error).__name__}: {error}"
    return None if worst < _TOLERANCE else f"results differ by {worst:.3g} of their size"
