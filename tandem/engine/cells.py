"""Reads and writes of a KV pool's cells with torch. An fp8 pool stores values without scales."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.model.fp8 import FP8, to_fp8


def indexable(pool: Tensor) -> Tensor:
    """The same memory in a dtype that torch can index: fp8 as bytes."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def to_cells(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts values to the elements of an `indexable` pool of `dtype`."""
    return to_fp8(x).view(torch.uint8) if dtype == FP8 else x


def from_cells(cells: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """Converts elements of an `indexable` pool of `dtype` to values in `wide`."""
    return cells.view(dtype).to(wide)
