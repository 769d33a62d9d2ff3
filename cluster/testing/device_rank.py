"""A rank on a CPU whose agent uses its pool as one in device memory: transports between GPUs run without any."""

from __future__ import annotations

import msgspec

import worker.rank
from cluster.backends.rank_process import make_roles
from kvtransfer.control import HOST_DEVICE, AttachPool, DeviceMemory
from tandem.config.launch import WorkerLaunch
from worker.rank import EngineRank
from worker.roles import WorkerIdentity

_attach_message = worker.rank.attach_message


def attach_message(launch: WorkerLaunch, identity: WorkerIdentity, rank: EngineRank, index: int) -> AttachPool:
    memory = DeviceMemory(HOST_DEVICE, rank.layout.pool_bytes)
    return msgspec.structs.replace(_attach_message(launch, identity, rank, index), memory=memory)


if __name__ == "__main__":
    worker.rank.attach_message = attach_message
    worker.rank.main(make_roles, "A rank whose pool counts as device memory.")
