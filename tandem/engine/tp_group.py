"""The tensor-parallel group of one worker: collectives for the model, and the leader's steps for its followers.

Rendezvous is a file in the worker's private folder, so the group opens no port of its own beyond the backend's, which
are bound to loopback: all ranks of a worker live on one host.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tandem.engine.step import StepInput, decode_step, encode_step

START_TIMEOUT = timedelta(seconds=120)
# An idle leader gives a sign of life every second; a step that takes longer than this is a hung peer.
STEP_TIMEOUT = timedelta(seconds=120)
LOOPBACK = "127.0.0.1"


class TpGroup:
    """`collectives` runs on the model's device; steps always travel over the CPU."""

    def __init__(self, rendezvous_file: Path, rank: int, size: int, device: torch.device) -> None:
        store = dist.FileStore(str(rendezvous_file), size)
        store.set_timeout(START_TIMEOUT)
        self.rank = rank
        self._steps = _gloo(dist.PrefixStore("steps", store), rank, size)
        self.collectives: ProcessGroup = (
            _nccl(dist.PrefixStore("nccl", store), rank, size)
            if device.type == "cuda"
            else _gloo(dist.PrefixStore("gloo", store), rank, size)
        )

    def send_step(self, step: StepInput) -> None:
        raw = encode_step(step)
        self._broadcast(torch.tensor([len(raw)], dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def steps(self) -> Iterator[StepInput]:
        """What the leader sends, until it says stop. Raises RuntimeError when the leader is gone."""
        while True:
            length = torch.zeros(1, dtype=torch.int64)
            self._broadcast(length)
            raw = torch.empty(int(length), dtype=torch.uint8)
            self._broadcast(raw)
            step = decode_step(raw.numpy().tobytes())
            if step.stop:
                return
            yield step

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._steps.broadcast([tensor], options).wait()


def _gloo(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = STEP_TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = STEP_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
