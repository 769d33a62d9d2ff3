"""A KV pool in device memory as a torch tensor; PoolMap is its counterpart in host memory.

On device "cpu" the memory is a memfd, so everything but kvtransfer.pool.cuda_ipc runs without a GPU.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault, protocol_fault
from kvtransfer.control import HOST_DEVICE, IPC_HANDLE_BYTES, DeviceMemory
from kvtransfer.pool import cuda_ipc
from kvtransfer.pool.copier_choice import choose_copier
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.piece_copier import AnyCopier, Launch, Place
from kvtransfer.pool.pool import Bytes, PoolMap, PoolSpan, check_span, full_blocks, runs
from kvtransfer.pool.staging import Staging
from tandem.kvcache.layout import KvPoolLayout

T = TypeVar("T")
WORD_BYTES = 8  # unit of copies; must divide a token's bytes in one head
KERNEL_ALIGNMENT = 16  # of pools in bytes, as when the kernel is compiled: another would compile it once more
MAX_RUN_COPIES = 8  # pieces of more runs are gathered and scattered
DIGEST_BYTES = 32 << 20  # at a time: torch makes products of twice the size


class Pending(Protocol):
    """A piece that the device copies or digests."""

    def wait(self) -> int:
        """Waits for its end, once. Returns its digest, 0 without keys. Raises DeviceLost."""
        ...


class DevicePool:
    """`words`: i64 [block, layer, side, head, block_tokens, words of a token].

    Operations wait for the device, but for those whose names say `start`. Each thread has its own stream.

    Args:
        memory: u8 [pool_bytes].
    """

    def __init__(self, layout: KvPoolLayout, memory: Tensor) -> None:
        self.layout = layout
        self.device = memory.device
        self.words = memory.view(torch.int64).view(
            layout.num_blocks, layout.layers, layout.sides, layout.kv_heads, layout.block_tokens, -1
        )
        self.staging = Staging(self._make_staging, layout.block_bytes)
        self._threads = threading.local()
        self._copier: AnyCopier | None = None
        self._is_aligned = memory.data_ptr() % KERNEL_ALIGNMENT == 0
        self._is_chosen = threading.Event()
        if self.device.type == "cpu":
            self._is_chosen.set()

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

    def pin(self, memory: Bytes) -> None:
        """Makes copies between host memory and this device faster, for as long as the process lives."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                cuda_ipc.pin(memory)

    def try_reading(self, source: DevicePool) -> None:
        """Reads one word of a peer's pool from this device. Raises DeviceLost or HandoffFault."""
        self.run(lambda: source.words.view(-1)[:1].clone().to(self.device))

    def launches_from(self, source: DevicePool | None) -> bool:
        """Whether a piece of any size and shape is one launch. None: it is only digested. Changes once at most, when
        the kernels are chosen."""
        return self._copier_for(self if source is None else source) is not None

    def _copier_for(self, source: DevicePool) -> AnyCopier | None:
        is_fit = source.device == self.device and source._is_aligned and self._is_aligned
        return self._copier if is_fit else None

    def choose_kernels(self) -> None:
        """Compiles the kernels of pieces on a GPU, and checks them. Call it once; it takes seconds, rarely a minute."""
        try:
            if self.device.type == "cuda" and self._is_aligned:
                self._copier = self.run(lambda: choose_copier(self.layout, self.device))
        finally:
            self._is_chosen.set()

    def await_kernels(self, timeout_s: float) -> bool:
        """Whether they were chosen within this time. Until then, pieces take torch's operations."""
        return self._is_chosen.wait(timeout_s)

    def make_keys(self, key: int) -> DigestKeys:
        row_words = self.layout.head_bytes // torch.int32.itemsize
        return self.run(lambda: DigestKeys(key, row_words, self.device))

    def _make_staging(self, size_bytes: int) -> Tensor:
        with device_errors():
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    # --- operations --------------------------------------------------------------------------------------------

    def digest(self, span: PoolSpan, keys: DigestKeys) -> int:
        return self.start_digest(span, keys).wait()

    def copy_from(self, source: DevicePool, read: PoolSpan, write: PoolSpan, keys: DigestKeys | None) -> int:
        """Copies a piece from another pool; `read` and `write` have the same shape.

        Returns:
            The digest of the bytes copied; 0 without keys. The kernel's is of the words that it read, torch's of our
            blocks. Only this process writes to these, so they need no second check.
        """
        return self.start_copy(source, read, write, keys).wait()

    def start_digest(self, span: PoolSpan, keys: DigestKeys) -> Pending:
        """`digest` that the device may still compute. Pieces that one thread starts end in order."""
        if (copier := self._copier_for(self)) is not None:
            return self._start(copier, self._place(span), None, keys)
        return _Done(self.run(lambda: self._digest(span, keys)))

    def start_copy(self, source: DevicePool, read: PoolSpan, write: PoolSpan, keys: DigestKeys | None) -> Pending:
        """`copy_from` that may still be under way. Pieces that one thread starts end in order.

        Raises DeviceLost or HandoffFault (transport)."""
        if (copier := self._copier_for(source)) is not None:
            return self._start(copier, source._place(read), self._place(write), keys)
        self.run(lambda: self._copy_from(source, read, write))
        return _Done(0) if keys is None else self.start_digest(write, keys)

    def _start(self, copier: AnyCopier, read: Place, write: Place | None, keys: DigestKeys | None) -> Pending:
        launched: list[Launch] = []
        try:
            done = self.start(lambda: launched.append(copier.launch(read, write, keys)))
        except (DeviceLost, HandoffFault):
            raise
        except Exception as error:  # Triton's: a variant that does not compile, or needs more than the GPU has
            message = f"pool: a piece cannot be launched: {type(error).__name__}: {error}"
            raise HandoffFault(HandoffCause.TRANSPORT, message) from error
        return _Launched(copier, done, launched[0])

    def _place(self, span: PoolSpan) -> Place:
        return Place(self.words.view(-1).view(torch.int32), self.layout, span)

    def pack(self, span: PoolSpan, out: Tensor) -> Tensor:
        """Gathers the span into `out`, u8 on our device, in canonical order. Returns the part used."""
        full_words, tail = self._parts_of(out, span)

        def work() -> None:
            full = full_blocks(self.layout, span)
            if full:
                torch.index_select(self._rectangle(span), 0, self._ids(span, full), out=full_words)
            if full < len(span.block_ids):
                tail.copy_(self._tail(span))

        self.run(work)
        return out[: 8 * (full_words.numel() + tail.numel())]

    def unpack(self, data: Tensor, span: PoolSpan) -> None:
        """Writes the bytes of `pack` into the span."""
        full_words, tail = self._parts_of(data, span)

        def work() -> None:
            full = full_blocks(self.layout, span)
            if full:
                self._rectangle(span).index_copy_(0, self._ids(span, full), full_words)
            if full < len(span.block_ids):
                self._tail(span).copy_(tail)

        self.run(work)

    def digest_packed(self, data: Tensor, span: PoolSpan, keys: DigestKeys) -> int:
        """`digest` of the bytes of `pack`."""
        parts = [part.view(torch.int32) for part in self._parts_of(data, span) if part.numel()]
        return self.run(lambda: keys.digest(parts))

    def _parts_of(self, data: Tensor, span: PoolSpan) -> tuple[Tensor, Tensor]:
        """Packed data as the span's full blocks and the tokens of its last block, each perhaps empty."""
        full = full_blocks(self.layout, span)
        inner = (span.layer_count, self.layout.sides, span.head_count)
        words = data[: len(data) // WORD_BYTES * WORD_BYTES].view(torch.int64)
        token_words = self.layout.token_bytes // WORD_BYTES
        shape = (full, *inner, self.layout.block_tokens, token_words)
        rest = (*inner, span.last_block_tokens if full < len(span.block_ids) else 0, token_words)
        size, tail = math.prod(shape), math.prod(rest)
        return words[:size].view(shape), words[size : size + tail].view(rest)

    @contextmanager
    def on_host(
        self, span: PoolSpan, staging: Staging[Bytes], *, write: bool, scratch_bytes: int = 0
    ) -> Iterator[tuple[PoolMap, PoolSpan, Bytes]]:
        """The span in host memory, for transports that move bytes, and `scratch_bytes` more, in one lease. `write`: the
        span starts with any content and is copied back."""
        blocks = len(span.block_ids)
        layout = replace(self.layout, num_blocks=blocks, layers=span.layer_count, kv_heads=span.head_count)
        inner = PoolSpan(tuple(range(blocks)), span.last_block_tokens, 0, span.layer_count, 0, span.head_count)
        with staging.lease(layout.pool_bytes + scratch_bytes, receives=write) as leased:
            buffer, scratch = leased[: layout.pool_bytes], leased[layout.pool_bytes :]
            host = DevicePool(layout, torch.from_numpy(buffer))
            if not write:
                self.run(lambda: host._copy_from(self, span, inner))
            yield PoolMap(layout, buffer), inner, scratch
            if write:
                self.run(lambda: self._copy_from(host, inner, span))

    def run(self, work: Callable[[], T]) -> T:
        """Runs work on this thread's stream, and waits for its end. Raises DeviceLost if the process can no longer use
        the device, and HandoffFault (transport) without memory."""
        if self.device.type == "cpu":
            return work()
        with device_errors():
            return cuda_ipc.run_on(self._stream(), work)

    def start(self, work: Callable[[], None]) -> cuda_ipc.Event:
        """Starts work on this thread's stream; on a GPU only. Returns an event at its end. Raises like `run`."""
        with device_errors():
            return cuda_ipc.start_on(self._stream(), work)

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._threads, "stream"):
            self._threads.stream = cuda_ipc.make_stream(self.device)
        stream: torch.cuda.Stream = self._threads.stream
        return stream

    def _digest(self, span: PoolSpan, keys: DigestKeys) -> int:
        return keys.digest(part.view(torch.int32) for part in self._parts(span))

    # --- views -------------------------------------------------------------------------------------------------

    def _copy_from(self, source: DevicePool, read: PoolSpan, write: PoolSpan) -> None:
        full = full_blocks(self.layout, write)
        found = list(runs(write.block_ids[:full], read.block_ids[:full]))
        if len(found) <= MAX_RUN_COPIES and source.device == self.device:
            for start, end in found:
                self._run(write, start, end).copy_(source._run(read, start, end))
        elif full and write.block_ids == tuple(range(len(write.block_ids))):  # to packed host memory, in one copy
            self._rectangle(write)[:full].copy_(source._full_blocks(read, full), non_blocking=True)
        elif full:  # contiguous torch tensors can be copied between devices without peer access
            moved = source._full_blocks(read, full).to(self.device, non_blocking=True)
            self._rectangle(write).index_copy_(0, self._ids(write, full), moved)
        if full < len(write.block_ids):
            self._tail(write).copy_(source._tail(read).contiguous().to(self.device))

    def _parts(self, span: PoolSpan) -> Iterator[Tensor]:
        """The span in canonical order: its full blocks, some at a time, then the valid tokens of a partial last one."""
        full = full_blocks(self.layout, span)
        block_bytes = span.layer_count * self.layout.sides * span.head_count * self.layout.head_bytes
        step = max(1, DIGEST_BYTES // block_bytes)
        for start in range(0, full, step):
            some = replace(span, block_ids=span.block_ids[start : min(start + step, full)])
            yield self._full_blocks(some, len(some.block_ids))
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

    def _full_blocks(self, span: PoolSpan, count: int) -> Tensor:
        """A view of the first `count` blocks if they are neighbours, else a copy."""
        is_one_run = len(list(runs(span.block_ids[:count]))) == 1
        return self._run(span, 0, count) if is_one_run else self._gather(span, count)

    def _gather(self, span: PoolSpan, count: int) -> Tensor:
        return self._rectangle(span).index_select(0, self._ids(span, count))

    def _ids(self, span: PoolSpan, count: int) -> Tensor:
        return torch.tensor(span.block_ids[:count], dtype=torch.int64, device=self.device)


@dataclass(frozen=True, slots=True)
class _Done:
    digest: int

    def wait(self) -> int:
        return self.digest


@dataclass(frozen=True, slots=True)
class _Launched:
    copier: AnyCopier
    done: cuda_ipc.Event
    launch: Launch

    def wait(self) -> int:
        with device_errors():
            self.done.synchronize()
        digest = self.launch.digest
        self.copier.release(self.launch)
        return digest


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises DeviceLost for errors of CUDA, and HandoffFault (transport) without memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise HandoffFault(HandoffCause.TRANSPORT, f"pool: {error}") from error
    except RuntimeError as error:  # other CUDA errors are sticky: the context, and so the process, is unusable
        raise DeviceLost(str(error).splitlines()[0]) from error
