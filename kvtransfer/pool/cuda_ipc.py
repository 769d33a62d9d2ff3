"""All code that needs a GPU: sharing a pool's memory between processes, and streams.

The functions used (CUDA Driver API, "Memory Management", "Primary Context Management"):

    cuMemGetAddressRange    the allocation that contains a pointer; torch may place the pool inside a larger one
    cuIpcGetMemHandle       64 bytes that identify an allocation of cuMemAlloc to other processes; needs its base
    cuIpcOpenMemHandle      maps that allocation in the current context; fails in the process that owns it
    cuIpcCloseMemHandle     once for each open

torch has private functions for this, but their format differs between versions and they count references in files. A
context is current per thread, so `_bind` precedes each call. A GPU is identified by its UUID, because ordinals depend
on CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.control import IPC_HANDLE_BYTES, DeviceMemory
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
LAZY_ENABLE_PEER_ACCESS: Final = 1  # the only valid flag


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class Driver(Protocol):
    """The functions of libcuda used here. Each returns a CUresult, 0 for success."""

    cuInit: Callable[..., int]
    cuDeviceGet: Callable[..., int]
    cuDevicePrimaryCtxRetain: Callable[..., int]
    cuCtxSetCurrent: Callable[..., int]
    cuMemGetAddressRange_v2: Callable[..., int]
    cuIpcGetMemHandle: Callable[..., int]
    cuIpcOpenMemHandle_v2: Callable[..., int]
    cuIpcCloseMemHandle: Callable[..., int]


class CudaError(Exception):
    """A driver function failed."""


def load_driver() -> Driver:
    """Raises OSError if no driver is installed."""
    driver: Any = ctypes.CDLL("libcuda.so.1")
    address, size, number = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
    out = ctypes.POINTER
    driver.cuInit.argtypes = [ctypes.c_uint]
    driver.cuDeviceGet.argtypes = [out(number), number]
    driver.cuDevicePrimaryCtxRetain.argtypes = [out(ctypes.c_void_p), number]
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    driver.cuMemGetAddressRange_v2.argtypes = [out(address), out(size), address]
    driver.cuIpcGetMemHandle.argtypes = [out(IpcHandle), address]
    driver.cuIpcOpenMemHandle_v2.argtypes = [out(address), IpcHandle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [address]
    loaded: Driver = driver
    return loaded


# --- the four functions, on any driver -----------------------------------------------------------------------------


def name_allocation(driver: Driver, index: int, pointer: int) -> tuple[bytes, int]:
    """The handle of the allocation that contains `pointer`, and the pointer's offset in it. Raises CudaError."""
    _bind(driver, index)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), IpcHandle()
    _check("cuMemGetAddressRange", driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer))
    _check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(ctypes.byref(handle), base))
    return bytes(handle), pointer - base.value


def open_allocation(driver: Driver, index: int, handle: bytes) -> int:
    """Maps another process's allocation and returns its address. Raises CudaError."""
    _bind(driver, index)
    base = ctypes.c_uint64()
    given = IpcHandle.from_buffer_copy(handle)
    _check("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), given, LAZY_ENABLE_PEER_ACCESS))
    return base.value


def close_allocation(driver: Driver, index: int, base: int) -> None:
    """Raises CudaError."""
    _bind(driver, index)
    _check("cuIpcCloseMemHandle", driver.cuIpcCloseMemHandle(base))


def _bind(driver: Driver, index: int) -> None:
    """Makes the device's primary context, which torch uses, current in this thread. It stays retained."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
    _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))


def _check(name: str, result: int) -> None:
    if result != 0:
        raise CudaError(f"{name} failed: CUresult {result}")


# --- torch ---------------------------------------------------------------------------------------------------------


def gpu_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def gpu_index(uuid: str) -> int | None:
    """This process's ordinal of a GPU; None if it is not visible."""
    return next((index for index in range(torch.cuda.device_count()) if gpu_uuid(index) == uuid), None)


def export_tensor(tensor: Tensor) -> DeviceMemory:
    """Shares a contiguous CUDA tensor's memory with other processes, for the tensor's lifetime.

    Raises:
        ConfigError: the allocation cannot be shared.
    """
    index = tensor.get_device()
    try:
        with torch.cuda.device(index):  # restores the thread's device afterwards
            handle, offset = name_allocation(load_driver(), index, tensor.data_ptr())
    except (CudaError, OSError) as error:
        raise ConfigError(
            f"engine.device: the KV pool on cuda:{index} cannot be shared with its transfer agent: {error}; expected "
            "memory of cudaMalloc: remove expandable_segments and backend:cudaMallocAsync from PYTORCH_ALLOC_CONF",
            field="engine.device",
        ) from error
    return DeviceMemory(gpu_uuid(index), tensor.nbytes, handle, offset)


class _Mapped:
    """A mapped allocation, closed when its last tensor is freed."""

    def __init__(self, driver: Driver, index: int, base: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {  # torch rejects read-only arrays, although we only read a peer's
            "shape": (size_bytes,), "typestr": "|u1", "data": (base, False), "strides": None, "version": 3,
        }  # fmt: skip
        weakref.finalize(self, _unmap, driver, index, base).atexit = False  # process exit closes all mappings


def _unmap(driver: Driver, index: int, base: int) -> None:
    try:
        close_allocation(driver, index, base)
    except CudaError as error:
        log.warning("cannot unmap a peer's pool: %s", error)


def open_memory(memory: DeviceMemory) -> Tensor:
    """u8 [size_bytes] of another process's GPU memory.

    The driver documents no way to query the allocation's size. If a peer of the same user states too large a size, the
    first access fails with DeviceLost.

    Raises:
        HandoffFault: (transport) this process cannot reach it.
    """
    index = gpu_index(memory.device)
    if index is None:
        raise HandoffFault(HandoffCause.TRANSPORT, f"pool: no GPU {memory.device} is visible to this process")
    try:
        driver = load_driver()
        with torch.cuda.device(index):
            base = open_allocation(driver, index, memory.handle)
        mapped = _Mapped(driver, index, base, memory.offset + memory.size_bytes)
        return torch.as_tensor(mapped, device=torch.device("cuda", index))[memory.offset :]
    except (CudaError, OSError, RuntimeError) as error:
        raise HandoffFault(HandoffCause.TRANSPORT, f"pool: cannot open it on cuda:{index}: {error}") from error


def reaches(local: str, peer: str) -> bool:
    """Whether kernels on GPU `local` can read memory of GPU `peer`."""
    if local == peer:
        return True
    here, there = gpu_index(local), gpu_index(peer)
    return here is not None and there is not None and torch.cuda.can_device_access_peer(here, there)


def make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


def start_on(stream: torch.cuda.Stream, work: Callable[[], None]) -> Event:
    """Starts `work` on the stream. Returns an event at its end."""
    # Links may outnumber cores, so the thread that waits sleeps in a blocking event.
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
        done.record(stream)
    return done


def pin(memory: NDArray[np.uint8]) -> None:
    """Makes copies between this memory and GPUs asynchronous and faster, for as long as the process lives."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error) != 0:
        log.warning("cannot pin %d bytes of staging: copies from GPUs will be slower: %s", memory.nbytes, error)


def run_on(stream: torch.cuda.Stream, work: Callable[[], T]) -> T:
    """Runs `work` on the stream and waits for its end, without the interpreter lock.

    A copy from another GPU runs on that GPU's current stream; torch makes ours wait for it, so the event covers it.
    """
    found: list[T] = []
    start_on(stream, lambda: found.append(work())).synchronize()
    return found[0]
