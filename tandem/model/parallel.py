"""A rank's place in its tensor-parallel group, and the two collectives that a transformer needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tandem.errors import WorkerLost


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size`. The caller creates `group`; None if `size` is 1, where both collectives do nothing. If a
    peer is lost, a collective raises WorkerLost."""

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
        """The sum of every rank's `x`, in place if there is more than one rank."""
        if self.group is None:
            return x
        x = x.contiguous()
        with _worker_lost():
            self.group.allreduce([x]).wait()
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """[n, part] of each rank → [n, size · part]."""
        if self.group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with _worker_lost():
            self.group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)


@contextmanager
def _worker_lost() -> Iterator[None]:
    """Converts RuntimeError, which collectives raise for a lost or hung peer, to WorkerLost."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost(f"a rank of this worker is gone or hangs: {str(error).splitlines()[0]}") from error
