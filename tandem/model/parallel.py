"""Tensor parallelism as a value: who am I in the group, and the two collectives a transformer needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size`. `group` is made by the caller; None when `size` is 1, where both collectives do nothing.
    A lost peer raises RuntimeError from the collective."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank: expected 0 to {self.size - 1}, got {self.rank}")

    def shard(self, length: int) -> slice:
        """This rank's equal part of `length` rows."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in place where there is more than one rank."""
        if self.group is None:
            return x
        x = x.contiguous()
        self.group.allreduce([x]).wait()
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """[n, part] of each rank → [n, size · part]."""
        if self.group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self.group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)
