"""A GPU copy of a pool in host memory."""

from __future__ import annotations

import torch

from kvtransfer.pool.cuda_ipc import export_tensor
from kvtransfer.pool.pool import PoolMap

OWN_ALLOCATION_BYTES = 32 << 20  # torch places smaller tensors in shared allocations


class GpuMirror:
    """`memory` is what other processes need to open it."""

    def __init__(self, pool: PoolMap, device: str) -> None:
        self._host = torch.from_numpy(pool.blocks.reshape(-1))
        size = len(self._host)
        self.tensor = torch.zeros(max(size, OWN_ALLOCATION_BYTES), dtype=torch.uint8, device=device)[:size]
        torch.cuda.synchronize(self.tensor.device)  # the host's pool is zeros too
        self.memory = export_tensor(self.tensor)

    def upload(self) -> None:
        self.tensor.copy_(self._host)
        torch.cuda.synchronize(self.tensor.device)

    def download(self) -> None:
        self._host.copy_(self.tensor)
