"""The tensor-parallel group of one worker: the model's collectives, and the transport of steps to followers.

The rendezvous is a file in the worker's private folder. The group opens only the backend's ports, on loopback, because
all ranks of a worker share a host.
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

# Ranks load weights at different speeds, and the leader's first step waits for the transfer agents.
START_TIMEOUT = timedelta(seconds=120)
# An idle leader sends a heartbeat every second, and all ranks run a step together.
IDLE_TIMEOUT = timedelta(seconds=10)
# At most one layer's work is between two collectives of a step.
STEP_TIMEOUT = timedelta(seconds=120)
# A request that fails one rank fails each at the same place.
FAILED_ALIKE_TIMEOUT = timedelta(seconds=5)
LOOPBACK = "127.0.0.1"


class TpGroup:
    """`collectives` uses the model's device; steps are always sent over the CPU. A follower fails if its leader is
    silent for `idle_timeout`."""

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
        # Of its own: ranks that did not fail are in one of the others' collectives.
        self._failures = _gloo(PrefixStore("failures", store), rank, size)
        self.collectives = (
            _nccl(PrefixStore("nccl", store), rank, size)
            if device.type == "cuda"
            else _gloo(PrefixStore("gloo", store), rank, size)
        )

    def send_step(self, step: StepInput) -> None:
        """Raises WorkerLost if a follower is gone."""
        self.send(encode_step(step))

    def send(self, raw: bytes) -> None:
        """Sends what `messages` gives on the other ranks. Raises WorkerLost if one is gone."""
        self._broadcast(torch.tensor([len(raw)], dtype=torch.int64), STEP_TIMEOUT)
        self._broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8), STEP_TIMEOUT)

    def barrier(self) -> None:
        """Waits for every rank. Raises WorkerLost if one is gone or hangs."""
        try:
            self._steps.allreduce([torch.zeros(1)]).wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def close(self) -> None:
        """Ends the threads of steps. One that still lets go of the last step when the interpreter ends would abort the
        process."""
        del self._steps, self._failures

    def least(self, value: int) -> int:
        """The least `value` of all ranks, each of which calls this. Raises WorkerLost if one is gone or hangs."""
        return _least(self._steps, [value])[0]

    def check_failed_alike(self) -> None:
        """Called after a step failed here. Returns if it failed on each rank after the same collectives, so the group
        is as usable as before. Else raises WorkerLost."""
        collectives: Any = self.collectives
        done = collectives._get_sequence_number_for_group()  # counts collectives
        least, negative_most = _least(self._failures, [done, -done], FAILED_ALIKE_TIMEOUT)
        if least != -negative_most:
            raise WorkerLost("a step failed on all ranks of this worker, but at different places")

    def steps(self) -> Iterator[StepInput]:
        """Steps from the leader until it stops. Raises WorkerLost if the leader is gone or silent."""
        for raw in self.messages():
            step = decode_step(raw)
            if step.stop:
                return
            yield step

    def messages(self) -> Iterator[bytes]:
        """Without end. Raises WorkerLost if the leader is gone or silent."""
        timeout = START_TIMEOUT
        while True:
            length = torch.zeros(1, dtype=torch.int64)
            self._broadcast(length, timeout)
            raw = torch.empty(int(length), dtype=torch.uint8)
            self._broadcast(raw, self._idle_timeout)
            yield raw.numpy().tobytes()
            timeout = self._idle_timeout

    def _broadcast(self, tensor: Tensor, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        try:
            self._steps.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise _lost(error) from error


def _least(group: ProcessGroup, own: list[int], timeout: timedelta = STEP_TIMEOUT) -> list[int]:
    """The least of all ranks' values, at each place."""
    values = torch.tensor(own, dtype=torch.int64)
    options: Any = dist.AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp.MIN, timeout
    try:
        group.allreduce([values], options).wait()
    except RuntimeError as error:
        raise _lost(error) from error
    return [int(value) for value in values]


def _lost(error: RuntimeError) -> WorkerLost:
    return WorkerLost(f"a rank of this worker is gone or hangs: {str(error).splitlines()[0]}")


# torch's stubs lack Gloo's options and a backend's collectives, hence Any.


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
