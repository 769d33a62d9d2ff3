"""A fake rank's pool in any memory. Tests access it as bytes in host memory."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from kvtransfer.control import HOST_DEVICE, DeviceMemory
from kvtransfer.pool.pool import PoolMap
from tandem.kvcache.layout import KvPoolLayout

if TYPE_CHECKING:
    from torch import Tensor

    from kvtransfer.testing.gpu import GpuMirror


def make_pool(layout: KvPoolLayout) -> tuple[int, PoolMap]:
    """A sealed memfd, as a rank creates it, and a writable view of it."""
    fd = os.memfd_create("tandem-test-pool", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.pool_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd, PoolMap.map_fd(layout, fd, writable=True)


class FakePool:
    """`device` is "" for host memory, "cpu" for host memory used as a device, or a GPU as torch names it.

    `pool` is the rank's view: the pool itself, or the GPU's memory at the last `download`. `fd` and `memory` are sent
    to the rank's agent.
    """

    def __init__(self, layout: KvPoolLayout, device: str) -> None:
        self._own_fd, self.pool = make_pool(layout)
        self.fd: int | None = self._own_fd
        self.memory = DeviceMemory(HOST_DEVICE, layout.pool_bytes) if device == HOST_DEVICE else None
        self._mirror: GpuMirror | None = None
        if device not in ("", HOST_DEVICE):
            from kvtransfer.testing.gpu import GpuMirror  # noqa: PLC0415 - imports torch

            self._mirror = GpuMirror(self.pool, device)
            self.fd, self.memory = None, self._mirror.memory

    def on_device(self) -> Tensor:
        """u8 [pool_bytes] of the memory that the rank's agent uses. Imports torch."""
        import torch  # noqa: PLC0415

        return torch.from_numpy(self.pool.blocks.reshape(-1)) if self._mirror is None else self._mirror.tensor

    def upload(self) -> None:
        """Call it after the rank writes. Other processes then see the change."""
        if self._mirror is not None:
            self._mirror.upload()

    def download(self) -> None:
        """Call it before the rank reads."""
        if self._mirror is not None:
            self._mirror.download()

    def close(self) -> None:
        os.close(self._own_fd)
