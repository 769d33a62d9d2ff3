"""A pool's cells as torch reads and writes them. One of fp8 (e4m3) holds values without a scale, ±448 at most."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = 448.0


def narrowed(x: Tensor) -> Tensor:
    """In fp8: to the nearest, of two the even one; ±448 for what is larger. NaN stays NaN."""
    return x.clamp(-_LARGEST, _LARGEST).to(FP8)


def movable(pool: Tensor) -> Tensor:
    """The same memory as torch can pick from and write to by index: of fp8 the bytes, on a CPU it cannot else."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a `movable` pool of `dtype` takes in."""
    return narrowed(x).view(torch.uint8) if dtype == FP8 else x


def loaded(cells: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """What was picked from a `movable` pool of `dtype`, in `wide`."""
    return cells.view(dtype).to(wide)
