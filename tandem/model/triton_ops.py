"""Operations between products in Triton: one launch and one pass over memory where torch needs several."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.checkpoint.model_families import Activation
from tandem.model.device_matrices import LARGEST
from tandem.model.rope import Rotation

_GATED_BLOCK = 1024


class TritonOps:
    """`Ops` for GPUs."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() == 3 else x.unsqueeze(1)
        outer, inner, width = rows.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _rms_norm[(outer, inner)](
                rows, weight, out, rows.stride(0), rows.stride(1), eps,
                width=width, padded=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 1,
            )  # fmt: skip
        return out

    def rms_norm_of_sum(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        tokens, width = x.shape
        total, out = (torch.empty(tokens, width, dtype=x.dtype, device=x.device) for _ in range(2))
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _rms_norm_of_sum[(tokens,)](
                x, added, weight, total, out, x.stride(0), added.stride(0), eps,
                width=width, padded=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 1,
            )  # fmt: skip
        return total, out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
        with torch.cuda.device_of(gate_up):  # type: ignore[no-untyped-call]
            _gated[(tokens, triton.cdiv(width, _GATED_BLOCK))](
                gate_up, out, width=width, block=_GATED_BLOCK, gelu=activation == "gelu_tanh"
            )
        return out

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        tokens, heads, width = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _rotate[(tokens, heads)](
                x, cos, sin, out, x.stride(0), x.stride(1),
                dims=cos.shape[-1], width=width, padded=triton.next_power_of_2(width), num_warps=1,
            )  # fmt: skip
        return out


def quantised_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`QuantiseRows` for GPUs."""
    x = x.contiguous()
    rows, width = x.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _quantise[(rows,)](
            x, values, scales, largest=LARGEST[dtype], whole=dtype == torch.int8,
            width=width, padded=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 4,
        )  # fmt: skip
    return values, scales


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x, weight, out, outer_stride, inner_stride, eps, width: tl.constexpr, padded: tl.constexpr
):  # fmt: skip
    """One program per row of x [outer, inner, width], whose last dimension is dense."""
    outer, inner = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, padded)
    there = place < width
    wide = tl.load(x + outer * outer_stride + inner * inner_stride + place, mask=there, other=0.0).to(tl.float32)
    to = out + (outer * tl.num_programs(1) + inner) * width + place
    tl.store(to, _normed(wide, weight + place, there, eps, width).to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_of_sum(  # type: ignore[no-untyped-def]
    x, added, weight, total, out, x_stride, added_stride, eps, width: tl.constexpr, padded: tl.constexpr
):  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    there = place < width
    wide = tl.load(x + row * x_stride + place, mask=there, other=0.0).to(tl.float32)
    wide += tl.load(added + row * added_stride + place, mask=there, other=0.0).to(tl.float32)
    rounded = wide.to(total.dtype.element_ty)
    tl.store(total + row * width + place, rounded, mask=there)
    normed = _normed(rounded.to(tl.float32), weight + place, there, eps, width)
    tl.store(out + row * width + place, normed.to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(wide, weight, there, eps, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 [padded], 0 where nothing is there → the same, of which the result is rounded."""
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight, mask=there, other=0.0)
    # Rounded like torch's; the product of two rounded numbers is exact in fp32.
    return (wide * scale).to(factor.dtype).to(tl.float32) * factor.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    gate_up, out, width: tl.constexpr, block: tl.constexpr, gelu: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    there = place < width
    gate = tl.load(gate_up + token * 2 * width + place, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + place, mask=there, other=0.0)
    if gelu:  # 0.5 x (1 + tanh(z)) is x · sigmoid(2z)
        opened = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        opened = gate * tl.sigmoid(gate)
    made = opened.to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * width + place, made.to(up.dtype), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, token_stride, head_stride, dims: tl.constexpr, width: tl.constexpr, padded: tl.constexpr
):  # fmt: skip
    """cos and signed sin [tokens, 1, dims]. Values beyond `dims` of a head are unchanged."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, padded)
    turns, there = place < dims, place < width
    at = x + token * token_stride + head * head_stride
    own = tl.load(at + place, mask=there, other=0.0)
    swapped = tl.load(at + (place + dims // 2) % dims, mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + token * dims + place, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + token * dims + place, mask=turns, other=0.0).to(tl.float32)
    turned = tl.where(turns, own.to(tl.float32) * c + swapped * s, own.to(tl.float32))
    tl.store(out + (token * tl.num_programs(1) + head) * width + place, turned.to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    x, values, scales, largest: tl.constexpr, whole: tl.constexpr, width: tl.constexpr, padded: tl.constexpr
):  # fmt: skip
    """One program per row. A row with NaN or infinity gets such a scale."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    there = place < width
    wide = tl.load(x + row * width + place, mask=there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0) / largest, 1.1754943508222875e-38) + tl.sum(wide * 0.0, 0)
    made = wide / scale
    if whole:
        made = tl.floor(made + 0.5)
    tl.store(values + row * width + place, made.to(values.dtype.element_ty), mask=there)
    tl.store(scales + row, scale)
