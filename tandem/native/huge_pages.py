"""Memory for weights in pages of 2 MiB, where the system has them. Each decode step reads all weights; with pages of
4 KiB a CPU spends about a fifth of a float32 step on translating addresses."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

PAGE_BYTES: Final = 2 << 20
REGION_BYTES: Final = 32 * PAGE_BYTES
_ALIGNMENT: Final = 64  # of a cache line, as torch's own memory


class HugePages:
    """Hands out parts of regions. A region is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._region: Tensor | None = None
        self._used = 0
        self._spans: list[range] = []  # addresses of all regions

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count]"""
        num_bytes = count * dtype.itemsize
        if self._region is None or self._used + num_bytes > self._region.numel():
            self._region, self._used = self._mapped(max(num_bytes, REGION_BYTES)), 0
        start = self._used
        self._used += math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
        return self._region[start : start + num_bytes].view(dtype)

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy; the tensor itself if that is here already."""
        if tensor.is_contiguous() and any(tensor.data_ptr() in span for span in self._spans):
            return tensor
        return self.empty(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    def _mapped(self, num_bytes: int) -> Tensor:
        """uint8, of at least so many bytes, at the start of a page."""
        num_bytes = math.ceil(num_bytes / PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes >> 20} MiB for weights: {error.strerror}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = -address % PAGE_BYTES
        with torch.inference_mode(False):  # heads are put here outside that mode too
            region = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=len(memory) - PAGE_BYTES)
        self._spans.append(range(region.data_ptr(), region.data_ptr() + region.numel()))
        return region
