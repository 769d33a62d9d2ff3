"""KV as int8 on the wire, with one scale per token and head, so an outlier token does not affect the others.

A packed piece consists of rows of `head_dim` values, one per token, head, K/V, layer and block. The wire format is the
scales of all rows (f32), then the rows (i8): about a quarter of the bytes of float32, half of bfloat16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtransfer.pool.pool import Bytes
from tandem.kvcache.layout import KvPoolLayout

INT8 = "int8"
_SCALE_BYTES = 4
_LARGEST = 127.0
Floats = npt.NDArray[np.float32]


def quantised_bytes(payload_bytes: int, layout: KvPoolLayout) -> int:
    """Bytes on the wire of a piece that takes `payload_bytes` in a pool of this layout."""
    rows = payload_bytes // layout.token_bytes
    return rows * (_SCALE_BYTES + layout.head_dim)


def quantise(packed: Bytes, layout: KvPoolLayout) -> Bytes:
    """Converts bytes from `PoolMap.pack` to the wire format. A row with a value that is not finite becomes NaN, so that
    the receiver's request fails rather than answers from other values."""
    values = _to_floats(packed, layout)
    scales = np.abs(values).max(axis=1) / _LARGEST  # NaN or infinite if a value is
    broken = ~np.isfinite(scales)
    scales[broken], values[broken] = np.nan, 0.0
    values /= np.where(scales > 0, scales, 1.0)[:, None]
    rows = np.rint(values, out=values).astype(np.int8)
    return np.concatenate([scales.astype(np.float32).view(np.uint8), rows.view(np.uint8).reshape(-1)])


def dequantise(wire: Bytes, layout: KvPoolLayout) -> Bytes:
    """Converts the wire format to bytes for `PoolMap.unpack`."""
    count = wire.size // (_SCALE_BYTES + layout.head_dim)
    scales = wire[: count * _SCALE_BYTES].view(np.float32)
    rows = wire[count * _SCALE_BYTES :].view(np.int8).reshape(count, layout.head_dim)
    return _from_floats(rows * scales[:, None], layout)


def _to_floats(packed: Bytes, layout: KvPoolLayout) -> Floats:
    """A fresh array [rows, head_dim]."""
    if layout.dtype == "bfloat16":  # the upper half of a float32
        wide = packed.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(-1, layout.head_dim)
    kind = np.float16 if layout.dtype == "float16" else np.float32
    return packed.view(kind).astype(np.float32).reshape(-1, layout.head_dim)


def _from_floats(values: Floats, layout: KvPoolLayout) -> Bytes:
    if layout.dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
        return (rounded >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    kind = np.float16 if layout.dtype == "float16" else np.float32
    return values.astype(kind).view(np.uint8).reshape(-1)
