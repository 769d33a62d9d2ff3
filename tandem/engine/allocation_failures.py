"""How a failed allocation shows, and what may be done after it."""

from __future__ import annotations

import torch

from tandem.errors import WorkerLost


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's error on a GPU, the untyped one of its CPU allocator, or Python's own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or "allocate memory" in str(error))
    )


def lost_for_memory(error: Exception) -> WorkerLost:
    """What ends a worker whose step found no memory."""
    return WorkerLost(f"a step ran out of memory: {str(error).splitlines()[0]}")


def return_unused() -> None:
    """Returns a GPU's memory that torch keeps for later allocations."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def leaves_device_unusable(error: Exception, *, on_device: bool) -> bool:
    """Whether every later call may fail too, or hang, as after most errors of a GPU."""
    return on_device and isinstance(error, RuntimeError) and not is_out_of_memory(error)
