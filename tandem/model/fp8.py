"""fp8 as multiplied by GPUs and stored in KV pools: e4m3, from ±2^-9 to ±448, with NaN and without infinity."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
LARGEST_FP8: Final = 448.0


def to_fp8(x: Tensor) -> Tensor:
    """Rounds to nearest even; larger values become ±448. NaN and infinity become NaN, so that a fault shows."""
    nan = math.nan
    return x.nan_to_num(nan, nan, nan).clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)
