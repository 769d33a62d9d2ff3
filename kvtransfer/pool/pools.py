"""Opens a rank's pool in host or device memory. Only device memory needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvtransfer.causes import protocol_fault
from kvtransfer.control import HOST_DEVICE, DeviceMemory
from kvtransfer.pool.pool import Bytes, PoolMap, make_staging
from kvtransfer.pool.staging import Staging
from tandem.kvcache.layout import KvPoolLayout

if TYPE_CHECKING:
    from kvtransfer.pool.device_pool import DevicePool

Pool: TypeAlias = "PoolMap | DevicePool"


def open_pool(layout: KvPoolLayout, memory: DeviceMemory | None, fds: list[int], *, writable: bool) -> Pool:
    """Opens another process's pool.

    Args:
        fds: descriptors sent with the message: the pool's memfd, or none for GPU memory.

    Raises:
        HandoffFault: (protocol) not a pool of this layout; (transport) not reachable from this process.
    """
    expected = 1 if memory is None or memory.device == HOST_DEVICE else 0
    if len(fds) != expected:
        raise protocol_fault(f"pool: expected {expected} descriptors with the message, got {len(fds)}")
    if memory is None:
        return PoolMap.map_fd(layout, fds[0], writable=writable)
    from kvtransfer.pool.device_pool import DevicePool  # noqa: PLC0415 - imports torch

    return DevicePool.open(layout, memory, fds[0] if fds else None, writable=writable)


def make_host_staging(pool: Pool) -> Staging[Bytes]:
    """Host memory for the links of a pool; pinned if the pool is on a GPU."""

    def make(size_bytes: int) -> Bytes:
        memory = make_staging(size_bytes)
        if not isinstance(pool, PoolMap):
            pool.pin(memory)
        return memory

    return Staging(make, 2 * pool.layout.block_bytes)
