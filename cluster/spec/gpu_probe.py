"""`python -m cluster.spec.gpu_probe`: prints the GPUs that torch sees, and what transports can use, as one JSON line.

A process of its own, because a CUDA context stays with the process that looked at a GPU, and so do libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any, Protocol

from cluster.devices import Gpu, GpuReport
from kvtransfer.connection.handshake import NCCL, NIXL
from kvtransfer.transports.host_support import THIS_HOST, HostSupport


class Cuda(Protocol):
    """What the probe uses of `torch.cuda`."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def get_device_properties(self, device: int, /) -> Any: ...

    def can_device_access_peer(self, device: int, peer_device: int, /) -> bool: ...


def report(torch_version: str, cuda_version: str | None, cuda: Cuda, host: HostSupport = THIS_HOST) -> GpuReport:
    count = cuda.device_count() if cuda.is_available() else 0
    return GpuReport(
        torch=torch_version,
        cuda=cuda_version,
        gpus=tuple(_gpu(ordinal, cuda.get_device_properties(ordinal)) for ordinal in range(count)),
        peers=frozenset(_peers(cuda, count)),
        missing={kind: why for kind in (NIXL, NCCL) if (why := host.missing(kind))},
        rdma=host.has_rdma(),
    )


def _gpu(ordinal: int, properties: Any) -> Gpu:
    return Gpu(ordinal=ordinal, name=properties.name, memory_bytes=properties.total_memory, uuid=str(properties.uuid))


def _peers(cuda: Cuda, count: int) -> Iterator[tuple[int, int]]:
    for reader, owner in permutations(range(count), 2):
        if cuda.can_device_access_peer(reader, owner):
            yield reader, owner


def main() -> None:
    import torch  # noqa: PLC0415 (`report` works without it)

    print(report(torch.__version__, torch.version.cuda, torch.cuda).model_dump_json())


if __name__ == "__main__":
    main()
