"""A GPU that fails under a rank: the rank's process ends with an exit code of its own, and at once.

CUDA errors are sticky: after one, every call of the process fails. Some hang, so the process ends without a shutdown of
CUDA, and without waiting for the other ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.errors import GpuLost
from worker.exit_codes import GPU_LOST_EXIT_CODE

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: the process can go on
# Errors that torch raises as plain RuntimeError: from its lazy start, and from libraries on the GPU. NCCL's say too
# little: a rank whose peer has ended gets one. If the GPU is lost, the next start fails with an error of CUDA.
_OTHER_CUDA_ERRORS = ("CUDA error", "CUDA unknown error", "No CUDA GPUs are available", "CUBLAS_STATUS_")


def lost_gpu(device: str, error: RuntimeError) -> GpuLost | None:
    """The typed error if the GPU can no longer be used by this process; None for any other failure."""
    if isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return None
    first = (str(error).splitlines() or [""])[0]
    if not isinstance(error, torch.AcceleratorError) and not any(text in first for text in _OTHER_CUDA_ERRORS):
        return None
    return GpuLost(f"{device} failed: {first}: look for Xid in the kernel's log and run `nvidia-smi -q`")


@contextmanager
def gpu_loss_ends_process(device: str) -> Iterator[None]:
    """Exits with GPU_LOST_EXIT_CODE if the GPU fails inside."""
    try:
        yield
    except RuntimeError as error:
        if (lost := lost_gpu(device, error)) is None:
            raise
        log.error("error: %s", lost, exc_info=error)
        log.error("error: %s", lost)  # the last line is what the controller reports
        logging.shutdown()
        os._exit(GPU_LOST_EXIT_CODE)
