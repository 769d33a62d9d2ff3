"""Look-ups in the prefix index by `prefix.c`. No torch."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tandem.errors import ConfigError
from tandem.kvcache.blockhash import HASH_BYTES
from tandem.native.build import library_path

SOURCE: Final = Path(__file__).with_name("prefix.c")


class PrefixRuns:
    """Look-ups in one table, whose slots must not move. Not thread-safe."""

    def __init__(self, slots: NDArray[np.uint64], multiplier: int, library: Any) -> None:
        """`slots`: contiguous buckets of eight. `library` is from `prefix_library`."""
        self._find = library.tandem_prefix_runs
        self._slots = slots  # keeps it alive: the library only has its address
        self._table = slots.ctypes.data, len(slots) // 8, multiplier
        self._reserve(256)

    def find(self, hashes: bytes) -> list[tuple[int, int]]:
        """Concatenated hashes → (index, number of the owner set) wherever the number changes."""
        count = len(hashes) // HASH_BYTES
        if count > len(self._where):
            self._reserve(2 * count)
        runs = self._find(*self._table, hashes, count, *self._room)
        return list(zip(self._where[:runs].tolist(), self._numbers[:runs].tolist(), strict=True))

    def _reserve(self, count: int) -> None:
        self._where, self._numbers = np.empty((2, count), np.int64)
        self._room = self._where.ctypes.data, self._numbers.ctypes.data


@cache
def prefix_library() -> Any:
    """The library, built if needed. Raises ConfigError saying what is missing."""
    try:
        # A call takes microseconds, less than releasing the interpreter lock.
        library = ctypes.PyDLL(str(library_path(SOURCE)))
    except OSError as error:
        raise ConfigError(f"native kernels: {SOURCE.name} does not load: {error}") from error
    library.tandem_prefix_runs.argtypes = [c_void_p, c_uint64, c_uint64, c_char_p, c_int64, c_void_p, c_void_p]
    library.tandem_prefix_runs.restype = c_int64
    return library
