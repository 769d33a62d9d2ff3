"""A KV pool in device memory as a torch tensor; PoolMap is its counterpart in host memory.

On device "cpu" the memory is a memfd, so everything but kvtransfer.pool.cuda_ipc runs without a GPU.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault, protocol_fault
from kvtransfer.control import HOST_DEVICE, IPC_HANDLE_BYTES, DeviceMemory
from kvtransfer.pool import cuda_ipc
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.pool import PoolMap, PoolSpan, check_span, full_blocks, runs
from tandem.kvcache.layout import KvPoolLayout

T = TypeVar("T")
WORD_BYTES = 8  # unit of copies; must divide a token's bytes in one head
MAX_RUN_COPIES = 8  # pieces of more runs are gathered and scattered


class DevicePool:
    """`words`: i64 [block, layer, 2, head, block_tokens, words of a token].

    Operations wait for the device. Each thread, and so each link, has its own stream.

    Args:
        memory: u8 [pool_bytes].
    """

    def __init__(self, layout: KvPoolLayout, memory: Tensor) -> None:
        self.layout = layout
        self.device = memory.device
        self.words = memory.view(torch.int64).view(
            layout.num_blocks, layout.layers, 2, layout.kv_heads, layout.block_tokens, -1
        )
        self._threads = threading.local()

    @classmethod
    def open(cls, layout: KvPoolLayout, memory: DeviceMemory, fd: int | None, *, writable: bool) -> DevicePool:
        """Opens another process's pool.

        Args:
            fd: the pool's memfd, on device "cpu".

        Raises:
            HandoffFault: (protocol) not a pool of this layout; (transport) not reachable.
        """
        if memory.size_bytes != layout.pool_bytes:
            raise protocol_fault(f"memory.size_bytes: expected {layout.pool_bytes}, got {memory.size_bytes}")
        if layout.token_bytes % WORD_BYTES:
            got = layout.token_bytes
            raise protocol_fault(
                f"layout.head_dim: expected a multiple of {WORD_BYTES} bytes per token and head, got {got}"
            )
        if memory.device == HOST_DEVICE:
            if fd is None:
                raise protocol_fault("memory.device: cpu requires the pool's descriptor with the message")
            host = PoolMap.map_fd(layout, fd, writable=writable)
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # numpy's array is read-only
                return cls(layout, torch.from_numpy(host.blocks.reshape(-1)))
        if len(memory.handle) != IPC_HANDLE_BYTES:
            raise protocol_fault(f"memory.handle: expected {IPC_HANDLE_BYTES} bytes, got {len(memory.handle)}")
        if memory.offset < 0 or memory.offset % WORD_BYTES:
            raise protocol_fault(
                f"memory.offset: expected a multiple of {WORD_BYTES} of at least 0, got {memory.offset}"
            )
        return cls(layout, cuda_ipc.open_memory(memory))

    @staticmethod
    def reaches(reader: str, device: str) -> bool:
        """Whether `reader` can read a pool on `device`, both named as in DeviceMemory."""
        return reader == device if HOST_DEVICE in (reader, device) else cuda_ipc.reaches(reader, device)

    def check(self, span: PoolSpan) -> None:
        """Raises HandoffFault (protocol) unless all of `span` is in this pool."""
        check_span(self.layout, span)

    def try_reading(self, source: DevicePool) -> None:
        """Reads one word of a peer's pool from this device. Raises DeviceLost or HandoffFault."""
        self.run(lambda: source.words.view(-1)[:1].clone().to(self.device))

    def make_keys(self, key: int) -> DigestKeys:
        row_words = self.layout.head_bytes // torch.int32.itemsize
        return self.run(lambda: DigestKeys(key, row_words, self.device))

    # --- operations --------------------------------------------------------------------------------------------

    def digest(self, span: PoolSpan, keys: DigestKeys) -> int:
        return self.run(lambda: self._digest(span, keys))

    def copy_from(self, source: DevicePool, read: PoolSpan, write: PoolSpan, keys: DigestKeys | None) -> int:
        """Copies a piece from another pool; `read` and `write` have the same shape.

        Returns:
            The digest of our blocks after the copy; 0 without keys. Only this process writes to our blocks.
        """

        def work() -> int:
            self._copy_from(source, read, write)
            return self._digest(write, keys) if keys is not None else 0

        return self.run(work)

    @contextmanager
    def on_host(self, span: PoolSpan, *, write: bool) -> Iterator[tuple[PoolMap, PoolSpan]]:
        """The span in host memory, for transports that move bytes. `write`: it starts empty and is copied back."""
        blocks = len(span.block_ids)
        layout = KvPoolLayout(
            blocks, span.layer_count, span.head_count, self.layout.block_tokens, self.layout.head_dim, self.layout.dtype
        )
        buffer = bytearray(layout.pool_bytes)
        staged = DevicePool(layout, torch.frombuffer(buffer, dtype=torch.uint8))
        inner = PoolSpan(tuple(range(blocks)), span.last_block_tokens, 0, span.layer_count, 0, span.head_count)
        if not write:
            self.run(lambda: staged._copy_from(self, span, inner))
        yield PoolMap(layout, buffer), inner
        if write:
            self.run(lambda: self._copy_from(staged, inner, span))

    def run(self, work: Callable[[], T]) -> T:
        """Runs work on this thread's stream. Raises DeviceLost if the process can no longer use the device, and
        HandoffFault (transport) without memory."""
        if self.device.type == "cpu":
            return work()
        try:
            if not hasattr(self._threads, "stream"):
                self._threads.stream = cuda_ipc.make_stream(self.device)
            return cuda_ipc.run_on(self._threads.stream, work)
        except torch.OutOfMemoryError as error:
            raise HandoffFault(HandoffCause.TRANSPORT, f"pool: {error}") from error
        except RuntimeError as error:  # other CUDA errors are sticky: the context, and so the process, is unusable
            raise DeviceLost(str(error).splitlines()[0]) from error

    def _digest(self, span: PoolSpan, keys: DigestKeys) -> int:
        return keys.digest(part.view(torch.int32) for part in self._parts(span))

    # --- views -------------------------------------------------------------------------------------------------

    def _copy_from(self, source: DevicePool, read: PoolSpan, write: PoolSpan) -> None:
        full = full_blocks(self.layout, write)
        found = list(runs(write.block_ids[:full], read.block_ids[:full]))
        if len(found) <= MAX_RUN_COPIES and source.device == self.device:
            for start, end in found:
                self._run(write, start, end).copy_(source._run(read, start, end))
        elif full:  # contiguous torch tensors can be copied between devices without peer access
            self._rectangle(write).index_copy_(0, self._ids(write, full), source._gather(read, full).to(self.device))
        if full < len(write.block_ids):
            self._tail(write).copy_(source._tail(read).contiguous().to(self.device))

    def _parts(self, span: PoolSpan) -> Iterator[Tensor]:
        """The span in canonical order: its full blocks, then the valid tokens of a partial last block."""
        full = full_blocks(self.layout, span)
        if full and len(list(runs(span.block_ids[:full]))) == 1:
            yield self._run(span, 0, full)
        elif full:
            yield self._gather(span, full)
        if full < len(span.block_ids):
            yield self._tail(span)

    def _rectangle(self, span: PoolSpan) -> Tensor:
        layers = slice(span.layer_start, span.layer_start + span.layer_count)
        heads = slice(span.head_start, span.head_start + span.head_count)
        return self.words[:, layers, :, heads]

    def _run(self, span: PoolSpan, start: int, end: int) -> Tensor:
        first = span.block_ids[start]
        return self._rectangle(span)[first : first + end - start]

    def _tail(self, span: PoolSpan) -> Tensor:
        return self._rectangle(span)[span.block_ids[-1], ..., : span.last_block_tokens, :]

    def _gather(self, span: PoolSpan, count: int) -> Tensor:
        return self._rectangle(span).index_select(0, self._ids(span, count))

    def _ids(self, span: PoolSpan, count: int) -> Tensor:
        return torch.tensor(span.block_ids[:count], dtype=torch.int64, device=self.device)
