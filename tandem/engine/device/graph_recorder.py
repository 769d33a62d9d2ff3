"""Recorders of decode steps: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class GraphRecorder(Protocol):
    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that repeats `work` on the same tensors. May call `work` any number of times, or never."""
        ...


class CudaGraphRecorder:
    """CUDA graphs that share one memory pool, since no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            warmup = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            warmup.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warmup):
                work()  # libraries allocate and select kernels at first use, which a graph cannot record
            torch.cuda.current_stream().wait_stream(warmup)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's watchdog, may call CUDA during the capture.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                work()
        return graph.replay
