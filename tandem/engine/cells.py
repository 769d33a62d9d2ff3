"""A KV pool's cells as torch picks and writes them. A pool of fp8 holds values without a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.model.fp8 import FP8, narrowed


def movable(pool: Tensor) -> Tensor:
    """The same memory in a dtype that torch indexes everywhere: of fp8 the bytes."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a `movable` pool of `dtype` takes in."""
    return narrowed(x).view(torch.uint8) if dtype == FP8 else x


def loaded(cells: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """What was picked from a `movable` pool of `dtype`, in `wide`."""
    return cells.view(dtype).to(wide)
