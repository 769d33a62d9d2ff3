"""XXH3 of bytes as they are copied, by `digest.c`, in one pass. No torch."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from tandem.errors import ConfigError, InternalError
from tandem.native.build import library_path

Bytes = npt.NDArray[np.uint8]
SOURCE: Final = Path(__file__).with_name("digest.c")
STRIPE_BYTES: Final = 64
SHORTEST_BYTES: Final = 241  # shorter inputs use another algorithm
_DIMS: Final = 4


class _State(ctypes.Structure):
    _fields_ = [("lanes", c_uint64 * 8), ("total", c_uint64), ("left", c_uint64), ("stripe", c_uint64)]


class NativeDigest:
    """The 64-bit XXH3 of `size_bytes` bytes (at least SHORTEST_BYTES) that arrive in parts.

    A part is a byte array with up to four dimensions around contiguous rows, each a multiple of a stripe.
    """

    def __init__(self, size_bytes: int, library: Any) -> None:
        """`library` is from `checked_library`."""
        self._c = library
        self._state = _State()
        self._address = ctypes.addressof(self._state)
        self._c.tandem_digest_begin(self._address, size_bytes)

    def feed(self, part: Bytes) -> None:
        self._move(part, None, past_cache=False)

    def copy(self, target: Bytes, source: Bytes, *, past_cache: bool) -> None:
        """Copies one part to another of the same shape. `past_cache`: the target is not read soon, so its lines need
        not be cached."""
        self._move(source, target, past_cache=past_cache)

    def value(self) -> int:
        if self._state.left:
            raise InternalError(f"digest: {self._state.left} bytes are missing")
        return int(self._c.tandem_digest_end(self._address))

    def _move(self, source: Bytes, target: Bytes | None, *, past_cache: bool) -> None:
        size, outer = _row(source, target)
        if size % STRIPE_BYTES or outer > _DIMS or source.size > self._state.left:
            raise InternalError(f"digest: expected rows of whole stripes, got {source.shape} with {source.strides}")
        if target is not None and (target.shape != source.shape or not target.flags.writeable):
            raise InternalError(f"digest: expected room for {source.shape}, got {target.shape}")
        room = _DIMS - outer
        counts = (c_int64 * _DIMS)(*[1] * room, *source.shape[:outer])
        steps = (c_int64 * _DIMS)(*[0] * room, *source.strides[:outer])
        target_steps = None if target is None else (c_int64 * _DIMS)(*[0] * room, *target.strides[:outer])
        address = None if target is None else _address(target)
        self._c.tandem_digest_move(
            self._address, _address(source), address, size, counts, steps, target_steps, int(past_cache)
        )


def _address(part: Bytes) -> int:
    return int(part.__array_interface__["data"][0])


def _row(source: Bytes, target: Bytes | None) -> tuple[int, int]:
    """Number of bytes that are contiguous in both, and of dimensions around them."""
    size, outer = 1, source.ndim
    while outer:
        count = source.shape[outer - 1]
        strides = {source.strides[outer - 1], size if target is None else target.strides[outer - 1]}
        if count != 1 and strides != {size}:
            break
        size, outer = size * count, outer - 1
    return size, outer


@cache
def checked_library() -> Any:
    """The library, built if needed and compared with the xxhash package.

    Raises ConfigError saying what is missing or wrong.
    """
    try:
        library = ctypes.CDLL(str(library_path(SOURCE)))
    except OSError as error:
        raise ConfigError(f"native kernels: {SOURCE.name} does not load: {error}") from error
    library.tandem_digest_begin.argtypes = [c_void_p, c_uint64]
    library.tandem_digest_begin.restype = None
    library.tandem_digest_move.argtypes = [c_void_p] * 3 + [c_uint64] + [c_void_p] * 3 + [c_int]
    library.tandem_digest_move.restype = None
    library.tandem_digest_end.argtypes = [c_void_p]
    library.tandem_digest_end.restype = c_uint64
    _check(library)
    return library


def _check(library: Any) -> None:
    """Compares inputs longer than a block of stripes, copied in two ways, and read."""
    data = np.frombuffer(np.random.default_rng(0).bytes(3 * STRIPE_BYTES * 19), np.uint8).reshape(3, -1)
    copies = np.zeros((2, *data.shape), np.uint8)
    digest = NativeDigest(3 * data.nbytes, library)
    digest.feed(data)
    digest.copy(copies[0, :, :64], data[:, :64], past_cache=False)
    digest.copy(copies[0, :, 64:], data[:, 64:], past_cache=True)
    digest.copy(copies[1], data, past_cache=True)
    expected = b"".join(part.tobytes() for part in (data, data[:, :64], data[:, 64:], data))
    if digest.value() != xxhash.xxh3_64_intdigest(expected) or not (copies == data).all():
        raise ConfigError(f"native kernels: {SOURCE.name} gives wrong results on this machine")
