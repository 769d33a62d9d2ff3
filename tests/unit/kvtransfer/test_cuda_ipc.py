"""What is asked of the CUDA driver, and in what order, by a driver made of C functions that has no GPU."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, cast

import pytest
import torch

from kvtransfer.pool.cuda_ipc import (
    LAZY_ENABLE_PEER_ACCESS,
    CudaError,
    Driver,
    IpcHandle,
    close_allocation,
    gpu_index,
    name_allocation,
    open_allocation,
)

BASE, SIZE, OFFSET = 0x7F00_0000_0000, 20 << 20, 4096
CONTEXT, OPENED = 0x55, 0x7E00_0000_0000
HANDLE = bytes(range(64))


class FakeDriver:
    """Called over the C calling convention, as the real one is: the handle of 64 bytes goes by value."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._failing = failing
        self.cuInit = CFUNCTYPE(c_int, c_uint)(lambda flags: self._note("init", flags))
        self.cuDeviceGet = CFUNCTYPE(c_int, POINTER(c_int), c_int)(self._device_get)
        self.cuDevicePrimaryCtxRetain = CFUNCTYPE(c_int, POINTER(c_void_p), c_int)(self._retain)
        self.cuCtxSetCurrent = CFUNCTYPE(c_int, c_void_p)(lambda context: self._note("current", context))
        self.cuMemGetAddressRange_v2 = CFUNCTYPE(c_int, POINTER(c_uint64), POINTER(c_size_t), c_uint64)(self._range)
        self.cuIpcGetMemHandle = CFUNCTYPE(c_int, POINTER(IpcHandle), c_uint64)(self._name)
        self.cuIpcOpenMemHandle_v2 = CFUNCTYPE(c_int, POINTER(c_uint64), IpcHandle, c_uint)(self._open)
        self.cuIpcCloseMemHandle = CFUNCTYPE(c_int, c_uint64)(lambda base: self._note("close", base))

    def _note(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        return 201 if name == self._failing else 0

    def _device_get(self, device: Any, ordinal: int) -> int:
        device[0] = 10 + ordinal
        return self._note("device", ordinal)

    def _retain(self, context: Any, device: int) -> int:
        context[0] = CONTEXT
        return self._note("retain", device)

    def _range(self, base: Any, size: Any, pointer: int) -> int:
        base[0], size[0] = BASE, SIZE
        return self._note("range", pointer)

    def _name(self, handle: Any, pointer: int) -> int:
        ctypes.memmove(handle, HANDLE, len(HANDLE))
        return self._note("name", pointer)

    def _open(self, base: Any, handle: IpcHandle, flags: int) -> int:
        base[0] = OPENED
        return self._note("open", bytes(handle), flags)


BOUND = [("init", 0), ("device", 3), ("retain", 13), ("current", CONTEXT)]


def test_the_allocation_is_named_by_its_base_and_the_pool_by_its_offset_in_it() -> None:
    driver: Any = FakeDriver()
    assert name_allocation(driver, 3, BASE + OFFSET) == (HANDLE, OFFSET)
    assert driver.calls == [*BOUND, ("range", BASE + OFFSET), ("name", BASE)]


def test_an_allocation_is_opened_and_closed_in_the_devices_own_context() -> None:
    driver: Any = FakeDriver()
    assert open_allocation(driver, 3, HANDLE) == OPENED
    assert driver.calls == [*BOUND, ("open", HANDLE, LAZY_ENABLE_PEER_ACCESS)]
    driver.calls.clear()
    close_allocation(driver, 3, OPENED)
    assert driver.calls == [*BOUND, ("close", OPENED)]


@pytest.mark.parametrize(
    ("failing", "function"),
    [("init", "cuInit"), ("retain", "cuDevicePrimaryCtxRetain"), ("open", "cuIpcOpenMemHandle")],
)
def test_what_fails_is_named_with_its_result(failing: str, function: str) -> None:
    with pytest.raises(CudaError, match=f"{function} failed: CUresult 201"):
        open_allocation(cast(Driver, FakeDriver(failing)), 3, HANDLE)


def test_a_gpu_that_this_process_does_not_see_has_no_ordinal() -> None:
    assert torch.cuda.is_available() or gpu_index("00000000-0000-0000-0000-000000000000") is None
