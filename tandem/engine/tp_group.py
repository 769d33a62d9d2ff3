"""The tensor-parallel group of one worker: collectives for the model, and the leader's steps for its followers.

Rendezvous is a file in the worker's private folder, so the group opens no port of its own beyond the backend's, which
are bound to loopback: all ranks of a worker live on one host.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed import ProcessGroup

from tandem.engine.step import StepInput, decode_step, encode_step
from tandem.errors import WorkerLost

# Ranks load their weights at different speeds, and the leader's first step comes when its agents are there.
START_TIMEOUT = timedelta(seconds=120)
# An idle leader gives a sign of life every second, and all ranks run a step together.
IDLE_TIMEOUT = timedelta(seconds=10)
# Between two collectives of one step lies no more than one layer of it.
STEP_TIMEOUT = timedelta(seconds=120)
LOOPBACK = "127.0.0.1"


class TpGroup:
    """`collectives` runs on the model's device; steps always travel over the CPU. A follower gives its leader up when
    that was silent for `idle_timeout`."""

    def __init__(
        self,
        rendezvous_file: Path,
        rank: int,
        size: int,
        device: torch.device,
        idle_timeout: timedelta = IDLE_TIMEOUT,
    ) -> None:
        store = FileStore(str(rendezvous_file), size)
        store.set_timeout(START_TIMEOUT)
        self._idle_timeout = idle_timeout
        self._steps = _gloo(PrefixStore("steps", store), rank, size)
        self.collectives = (
            _nccl(PrefixStore("nccl", store), rank, size)
            if device.type == "cuda"
            else _gloo(PrefixStore("gloo", store), rank, size)
        )

    def send_step(self, step: StepInput) -> None:
        """Raises WorkerLost when a follower is gone."""
        raw = encode_step(step)
        self._broadcast(torch.tensor([len(raw)], dtype=torch.int64), STEP_TIMEOUT)
        self._broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8), STEP_TIMEOUT)

    def meet(self) -> None:
        """Returns when every rank has called it. Raises WorkerLost when one is gone or hangs."""
        try:
            self._steps.allreduce([torch.zeros(1)]).wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def steps(self) -> Iterator[StepInput]:
        """What the leader sends, until it says stop. Raises WorkerLost when the leader is gone or silent."""
        timeout = START_TIMEOUT
        while True:
            length = torch.zeros(1, dtype=torch.int64)
            self._broadcast(length, timeout)
            raw = torch.empty(int(length), dtype=torch.uint8)
            self._broadcast(raw, self._idle_timeout)
            step = decode_step(raw.numpy().tobytes())
            if step.stop:
                return
            yield step
            timeout = self._idle_timeout

    def _broadcast(self, tensor: Tensor, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        try:
            self._steps.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> WorkerLost:
    return WorkerLost(f"a rank of this worker is gone or hangs: {str(error).splitlines()[0]}")


# torch's stubs neither know Gloo's options nor that a backend by itself has a group's collectives: hence Any.


def _gloo(store: PrefixStore, rank: int, size: int) -> ProcessGroup:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname=LOOPBACK)]
    options._timeout = STEP_TIMEOUT
    group: ProcessGroup = backend(store, rank, size, options)
    return group


def _nccl(store: PrefixStore, rank: int, size: int) -> ProcessGroup:
    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = STEP_TIMEOUT
    group: ProcessGroup = backend(store, rank, size, options)
    return group
