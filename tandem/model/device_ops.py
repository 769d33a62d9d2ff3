"""Chooses element-wise operations: native kernels on a CPU, Triton's on a GPU if they are correct, else torch's."""

from __future__ import annotations

import importlib
import importlib.util
import logging

import torch

from tandem.model.ops import TORCH_OPS, NativeOps, Ops
from tandem.native.library import Kernels

_AMPERE = 8
_TOLERANCE = 0.02  # of the largest value; rounding in half precision stays below half of it

logger = logging.getLogger(__name__)


def choose_ops(kernels: Kernels | None, device: torch.device, dtype: torch.dtype) -> Ops:
    if kernels is not None:
        return NativeOps(kernels)
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return TORCH_OPS
    if torch.cuda.get_device_capability(device)[0] < _AMPERE:
        return TORCH_OPS
    module = importlib.import_module("tandem.model.triton_ops")  # imports Triton, which CPU machines lack
    ops: Ops = module.TritonOps()
    wrong = ops_error(ops, device, dtype)
    if wrong is None:
        return ops
    logger.warning("using torch's operations, more slowly than Triton: %s", wrong)
    return TORCH_OPS


def ops_error(ops: Ops, device: torch.device, dtype: torch.dtype) -> str | None:
    """The error of `ops` against torch's, including strided tensors and odd sizes; None if they are correct."""
    generator = torch.Generator(device).manual_seed(0)

    def some(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=of)

    x, other, heads, gate_up = some(5, 1544), some(5, 2000)[:, 3:1547], some(5, 9, 96)[:, 2:7], some(3, 2 * 1500)
    turns = [(some(5, 1, dims), some(5, 1, dims)) for dims in (96, 32)]
    weights = [some(1544), some(1544, of=torch.float32)]
    weight = some(96)
    try:
        made = [
            *((ops.rms_norm(x, each, 1e-5), TORCH_OPS.rms_norm(x, each, 1e-5)) for each in weights),
            (ops.rms_norm(heads, weight, 1e-5), TORCH_OPS.rms_norm(heads, weight, 1e-5)),
            *(
                pair
                for each in weights
                for pair in zip(
                    ops.rms_norm_of_sum(x, other, each, 1e-5),
                    TORCH_OPS.rms_norm_of_sum(x, other, each, 1e-5),
                    strict=True,
                )
            ),
            *((ops.rotate(heads.clone(), each), TORCH_OPS.rotate(heads, each)) for each in turns),
            (ops.gated(gate_up, "silu"), TORCH_OPS.gated(gate_up, "silu")),
            (ops.gated(gate_up, "gelu_tanh"), TORCH_OPS.gated(gate_up, "gelu_tanh")),
        ]
        worst = float(torch.stack([_difference(ours.float(), theirs.float()) for ours, theirs in made]).max())
    except Exception as error:  # not available: no compiler, or an old driver
        return f"{type(error).__name__}: {error}"
    return None if worst < _TOLERANCE else f"results differ by {worst:.3g} of the largest"  # worst may be NaN


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours - theirs).abs().max() / theirs.abs().max()
