"""The native kernels on tensors. Each call checks everything that could cause access outside a tensor."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tandem.errors import ConfigError, InternalError
from tandem.native.build import cpu_fields, library_path
from tandem.native.huge_pages import HugePages

SOURCE: Final = Path(__file__).with_name("kernels.c")
PANEL: Final = 16  # contiguous outputs in a packed matrix
GROUP: Final = 32  # inputs of an int4 matrix with a common scale and minimum
LANES: Final = 8  # fp32 numbers per vector
CELL_KINDS: Final = {"float32": 0, "int8": 1, "float8_e4m3": 2}  # of KV pools, by dtype
_QUERIES: Final = 96  # per KV head, for one pass over keys
_KEYS: Final = 64  # per tile
_QUERY_FLOATS: Final = 8  # state that the kernel keeps per query
_ROWS: Final = 6  # query rows whose scores are kept
_INT32_MAX: Final = 2**31 - 1
_INT16_MAX: Final = 2**15 - 1
_GROUP_BYTES: Final = PANEL * (2 + 2 + GROUP // 2)  # per panel
_SIGNATURES: Final = {
    "pack_i8": "ppii",
    "pack_i4": "ppppii",
    "pack_f32": "ppii",
    "linear_quantised": "piiippppipppftt",
    "linear_f32": "piipppipt",
    "linear_dense": "piipppitt",
    "rms_norm": "pippiift",
    "gated": "ppiitt",
    "rotate": "pippiiiit",
    "best": "ppiit",
    "store_kv": "pippippiiiitt",
    "attend": "pipipipppiiiiiifftpipt",
}
_TYPES: Final = {"p": c_void_p, "i": c_int64, "f": c_float, "t": c_int}


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """A matrix [outputs, inputs] in the kernels' order, with one scale per output. `most` bounds a quantised input, so
    that no sum of products overflows."""

    packed: Tensor
    scales: Tensor
    outputs: int
    inputs: int
    most: float

    @property
    def size_bytes(self) -> int:
        return self.packed.numel() + 4 * self.scales.numel()


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A matrix [outputs, inputs] in the kernels' order, with scales per group of inputs."""

    packed: Tensor
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class PackedFloat32:
    """A matrix [outputs, inputs] in the kernels' order."""

    packed: Tensor
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Cells:
    """One layer of a rank's KV pool as bytes: its address, the distance between blocks, and their layout. `dtype` is
    one of CELL_KINDS."""

    address: int
    block_bytes: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str


def rows_for_kernels(cpu: Mapping[str, str]) -> float:
    """Up to how many rows `linear_dense` is faster than torch's CPU products, which use AVX-512 on Intel's processors
    only. Ours use it with VNNI only. `cpu`: as in `cpu_fields`."""
    flags, is_intel = cpu.get("flags", "").split(), cpu.get("vendor_id") == "GenuineIntel"
    if "avx512_vnni" in flags and not is_intel:
        return math.inf
    return 15 if "avx512f" in flags and "avx512_vnni" not in flags and is_intel else 48


class Kernels:
    """Calls the kernels. Not thread-safe, because it owns scratch memory. `lanes`: most numbers in a vector of
    products; 16 are used where the processor has AVX-512 with VNNI, otherwise 8."""

    def __init__(self, threads: int, lanes: int = 16) -> None:
        """Raises ConfigError if this machine has none."""
        try:
            library = ctypes.CDLL(str(library_path(SOURCE)))
        except (ConfigError, OSError) as error:
            raise ConfigError(
                f"engine.kernels: {error}; set engine.kernels to torch", field="engine.kernels"
            ) from error
        for name, signature in _SIGNATURES.items():
            function = getattr(library, f"tandem_{name}")
            function.argtypes = [_TYPES[each] for each in signature]
            function.restype = None
        self.pages = HugePages()
        self._c: Any = library
        self._threads = threads
        self._lanes = lanes
        self.most_dense_rows = rows_for_kernels(cpu_fields())
        self._ints = torch.empty(0, dtype=torch.int16)
        self._scales = torch.empty(0)
        self._sums = torch.empty(0)
        self._tiles = torch.empty(0)
        self._scratch = torch.empty(0)

    # --- matrices ----------------------------------------------------------------------------------------------

    def pack_int8(self, values: Tensor, scales: Tensor) -> PackedInt8:
        """values int8 [outputs, inputs] within ±127, scales fp32 [outputs]."""
        outputs, inputs = values.shape
        padded = torch.zeros(_up(outputs, PANEL), _up(inputs, 2), dtype=torch.int8)
        padded[:outputs, :inputs] = values
        packed = self.pages.empty(padded.numel(), torch.int8)
        self._c.tandem_pack_i8(padded.data_ptr(), packed.data_ptr(), *padded.shape)
        most = min(_INT16_MAX, _INT32_MAX // (127 * padded.shape[1]))
        return PackedInt8(packed, _padded(scales), outputs, inputs, float(most))

    def pack_int4(self, values: Tensor, scales: Tensor, least: Tensor) -> PackedInt4:
        """values uint8 [outputs, inputs] of 0 to 15; scales, least fp16 [outputs, groups of inputs], where the last
        group may be short. A weight is least + value · scale."""
        outputs, inputs = values.shape
        padded = torch.zeros(_up(outputs, PANEL), _up(inputs, GROUP), dtype=torch.uint8)
        padded[:outputs, :inputs] = values
        groups = padded.shape[1] // GROUP
        per_group = torch.zeros(2, padded.shape[0], groups, dtype=torch.float16)
        per_group[:, :outputs] = torch.stack((scales, least))
        packed = self.pages.empty(padded.shape[0] // PANEL * groups * _GROUP_BYTES, torch.uint8)
        self._c.tandem_pack_i4(
            padded.data_ptr(), per_group[0].data_ptr(), per_group[1].data_ptr(), packed.data_ptr(), *padded.shape
        )
        return PackedInt4(packed, outputs, inputs)

    def pack_float32(self, weight: Tensor) -> PackedFloat32:
        """weight fp32 [outputs, inputs]"""
        outputs, inputs = weight.shape
        padded = torch.zeros(_up(outputs, PANEL), inputs)
        padded[:outputs] = weight
        packed = self.pages.empty(padded.numel(), torch.float32)
        self._c.tandem_pack_f32(padded.data_ptr(), packed.data_ptr(), *padded.shape)
        return PackedFloat32(packed, outputs, inputs)

    def linear_int8(self, x: Tensor, matrix: PackedInt8, bias: Tensor | None) -> Tensor:
        """x fp32 [rows, inputs] → [rows, outputs]; bias [outputs padded to whole panels] (`padded_bias`)."""
        return self._linear_quantised(x, matrix, _up(matrix.inputs, 2), matrix.scales, bias, None, matrix.most)

    def linear_int4(self, x: Tensor, matrix: PackedInt4, bias: Tensor | None) -> Tensor:
        """The same with an int4 matrix."""
        wide = _up(matrix.inputs, GROUP)
        if self._sums.numel() < x.shape[0] * wide // GROUP:
            self._sums = torch.empty(x.shape[0] * wide // GROUP)
        return self._linear_quantised(x, matrix, wide, None, bias, self._sums, float(_INT16_MAX))

    def _linear_quantised(
        self,
        x: Tensor,
        matrix: PackedInt8 | PackedInt4,
        wide: int,
        scales: Tensor | None,
        bias: Tensor | None,
        sums: Tensor | None,
        most: float,
    ) -> Tensor:
        x = _floats(x, matrix.inputs)
        rows = x.shape[0]
        if self._ints.numel() < rows * wide:
            self._ints = torch.empty(rows * wide, dtype=torch.int16)
        if self._scales.numel() < rows:
            self._scales = torch.empty(rows)
        out = torch.empty(rows, matrix.outputs)
        self._c.tandem_linear_quantised(
            x.data_ptr(), rows, matrix.inputs, wide, matrix.packed.data_ptr(), _address(scales), _address(bias),
            out.data_ptr(), matrix.outputs, self._ints.data_ptr(), self._scales.data_ptr(), _address(sums), most,
            self._threads, self._lanes,
        )  # fmt: skip
        return out

    def linear_float32(self, x: Tensor, matrix: PackedFloat32, bias: Tensor | None) -> Tensor:
        """The same in fp32."""
        x = _floats(x, matrix.inputs)
        out = torch.empty(x.shape[0], matrix.outputs)
        if self._tiles.numel() < x.numel():
            self._tiles = torch.empty(x.numel())
        self._c.tandem_linear_f32(
            x.data_ptr(), x.shape[0], matrix.inputs, matrix.packed.data_ptr(),
            _address(bias), out.data_ptr(), matrix.outputs, self._tiles.data_ptr(), self._threads,
        )  # fmt: skip
        return out

    def linear_dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with torch's contiguous fp32 matrix [outputs, inputs] and bias fp32 [outputs]."""
        outputs, inputs = weight.shape
        x = _floats(x, inputs)
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            raise InternalError(f"linear_dense: expected a contiguous fp32 matrix, got {weight.dtype}")
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (outputs,) or not bias.is_contiguous()):
            raise InternalError(f"linear_dense: expected {outputs} fp32 numbers as bias, got {bias.shape}")
        out = torch.empty(x.shape[0], outputs)
        self._c.tandem_linear_dense(
            x.data_ptr(), x.shape[0], inputs, weight.data_ptr(), _address(bias), out.data_ptr(), outputs,
            self._threads, self._lanes,
        )  # fmt: skip
        return out

    def padded_bias(self, bias: Tensor) -> Tensor:
        return _padded(bias)

    # --- element-wise work -------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x fp32 [..., width] → the same, contiguous. Leading dimensions must be equally spaced rows."""
        width = weight.shape[0]
        rows = _floats(x if x.dim() == 2 else x.reshape(-1, width), width)
        out = torch.empty(x.shape)
        self._c.tandem_rms_norm(
            rows.data_ptr(), width, weight.data_ptr(), out.data_ptr(), rows.shape[0], width, eps, self._threads
        )
        return out

    def gated(self, x: Tensor, *, gelu: bool) -> Tensor:
        """x fp32 [rows, 2 · width], gates first → [rows, width]; width is a multiple of LANES."""
        x = _floats(x, x.shape[1])
        width = x.shape[1] // 2
        if width % LANES or x.shape[1] != 2 * width:
            raise InternalError(f"gated: expected twice a multiple of {LANES} columns, got {x.shape[1]}")
        out = torch.empty(x.shape[0], width)
        self._c.tandem_gated(x.data_ptr(), out.data_ptr(), x.shape[0], width, int(gelu), self._threads)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """In place. x fp32 [tokens, heads, head_dim], a view of whole rows; cos, sin contiguous [tokens, 1, dims]."""
        tokens, heads, head_dim = x.shape
        dims = cos.shape[-1]
        fits = x.dtype == torch.float32 and x.stride(2) == 1 and x.stride(1) == head_dim and dims <= head_dim
        if not fits or dims % (2 * LANES) or cos.shape[0] != tokens or sin.shape != cos.shape:
            raise InternalError(f"rotate: expected rows of whole heads, got {tuple(x.shape)} and {tuple(cos.shape)}")
        self._c.tandem_rotate(
            x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), tokens, heads, head_dim, dims, self._threads
        )

    def best(self, x: Tensor) -> Tensor:
        """fp32 [rows, width] → int64 [rows]: index of each row's largest value, the first of equals; -1 if it is not
        finite."""
        x = _floats(x, x.shape[1])
        best = torch.empty(x.shape[0], dtype=torch.int64)
        self._c.tandem_best(x.data_ptr(), best.data_ptr(), *x.shape, self._threads)
        return best

    # --- paged attention ---------------------------------------------------------------------------------------

    def store_kv(self, cells: Cells, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """k, v fp32 [tokens, kv_heads, head_dim], equally spaced rows; blocks, offsets int64 [tokens], checked by the
        caller."""
        if k.stride() != v.stride() or k.stride(2) != 1 or k.stride(1) != cells.head_dim:
            v = v.contiguous()
            k = k.contiguous()
        self._c.tandem_store_kv(
            cells.address, cells.block_bytes, k.data_ptr(), v.data_ptr(), k.stride(0), blocks.data_ptr(),
            offsets.data_ptr(), k.shape[0], cells.kv_heads, cells.block_tokens, cells.head_dim, CELL_KINDS[cells.dtype],
            self._threads,
        )  # fmt: skip

    @staticmethod
    def tokens_at_once(per_kv: int) -> int:
        """The best number of one request's tokens to process together, if `per_kv` query heads share a KV head."""
        return max(1, _QUERIES // per_kv)

    def attend(
        self,
        cells: Cells,
        q: Tensor,
        tables: Tensor,
        table_of: Tensor,
        positions: Tensor,
        items: Tensor,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """q fp32 [tokens, heads, head_dim] → contiguous [tokens, heads · head_dim].

        Each token attends to the keys of its own table (tables int64 [requests, width], table_of int64 [tokens]) up to
        its position (positions int64 [tokens]). `items` int64: the start of each run of at most `tokens_at_once`
        consecutive tokens of one request, and the end.
        """
        tokens, heads, head_dim = q.shape
        if q.stride(2) != 1 or q.stride(1) != head_dim:
            q = q.contiguous()
        per_kv, width = heads // cells.kv_heads, _up(head_dim, PANEL)
        rows = self.tokens_at_once(per_kv) * per_kv
        room = _up(2 * _KEYS * width + _ROWS * _KEYS + rows * (width + head_dim + _QUERY_FLOATS), PANEL)
        if self._scratch.numel() < room * self._threads:
            self._scratch = torch.empty(room * self._threads)
        out = torch.empty(tokens, heads * head_dim)
        self._c.tandem_attend(
            cells.address, cells.block_bytes, q.data_ptr(), q.stride(0), tables.data_ptr(), tables.shape[1],
            table_of.data_ptr(), positions.data_ptr(), items.data_ptr(), items.shape[0] - 1, heads, cells.kv_heads,
            cells.block_tokens, head_dim, window or 0, scale, softcap or 0.0, CELL_KINDS[cells.dtype],
            self._scratch.data_ptr(), room, out.data_ptr(), self._threads,
        )  # fmt: skip
        return out


def _floats(x: Tensor, width: int) -> Tensor:
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != width:
        raise InternalError(f"expected fp32 rows of {width}, got {x.dtype} {tuple(x.shape)}")
    return x.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _padded(row: Tensor) -> Tensor:
    padded = torch.zeros(_up(row.shape[0], PANEL))
    padded[: row.shape[0]] = row
    return padded


def _up(count: int, to: int) -> int:
    return -(-count // to) * to
