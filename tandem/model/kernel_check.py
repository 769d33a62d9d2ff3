"""Checks on this machine that the native kernels compute what torch computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError
from tandem.model.fp8 import to_fp8
from tandem.native.library import GROUP, Cells, Kernels

_TOLERANCE = 2e-3  # of values around 1; int8 keys and 13-bit rows stay far below it


@dataclass(frozen=True, slots=True)
class Trial:
    name: str
    got: Tensor
    expected: Tensor


def checked_kernels(threads: int) -> Kernels:
    """Raises ConfigError if there are no native kernels, or if a result differs from torch's."""
    kernels = Kernels(threads)
    with torch.inference_mode():
        for trial in trials(kernels):
            if not torch.allclose(trial.got, trial.expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise ConfigError(
                    f"engine.kernels: {trial.name} gives wrong results on this machine: set engine.kernels to torch",
                    field="engine.kernels",
                )
    return kernels


def trials(kernels: Kernels) -> Iterator[Trial]:
    """Each kernel's result beside torch's, for sizes that end inside every panel, tile and block."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    x, weight, bias = random(7, 53), random(37, 53) / 8, random(37)
    scales = weight.abs().amax(dim=1) / 127
    values = (weight / scales[:, None]).round().to(torch.int8)
    padded = kernels.padded_bias(bias)
    exact = F.linear(x.double(), values.double() * scales.double()[:, None], bias.double()).float()
    packed = kernels.pack_int8(values, scales)
    yield Trial("linear_i8", kernels.linear_int8(x, packed, padded), exact)
    yield Trial("linear_i8 of two rows", kernels.linear_int8(x[:2], packed, padded), exact[:2])
    fours = torch.randint(0, 16, (37, 53), generator=draw, dtype=torch.uint8)
    of_groups = (random(37, 2).half() / 16, random(37, 2).half())
    step, least = (each.double().repeat_interleave(GROUP, dim=1)[:, :53] for each in of_groups)
    exact = F.linear(x.double(), least + fours * step, bias.double()).float()
    yield Trial("linear_i4", kernels.linear_int4(x, kernels.pack_int4(fours, *of_groups), padded), exact)
    product = kernels.linear_float32(x, kernels.pack_float32(weight), padded)
    yield Trial("linear_f32", product, F.linear(x, weight, bias))
    yield Trial("linear_dense", kernels.linear_dense(x, weight, bias), F.linear(x, weight, bias))
    norm = random(53)
    yield Trial("rms_norm", kernels.rms_norm(x, norm, 1e-5), F.rms_norm(x, (53,), norm, 1e-5))
    gates = random(3, 48)
    yield Trial("gated", kernels.gated(gates, gelu=False), F.silu(gates[:, :24]) * gates[:, 24:])
    tanh = F.gelu(gates[:, :24], approximate="tanh") * gates[:, 24:]
    yield Trial("gated", kernels.gated(gates, gelu=True), tanh)
    rows = random(3, 53)
    yield Trial("best", kernels.best(rows), rows.argmax(dim=1))
    yield _rotation(kernels, random)
    yield _attention(kernels, random, "float32", softcap=None, window=None)
    yield _attention(kernels, random, "float32", softcap=5.0, window=9)
    yield _attention(kernels, random, "int8", softcap=None, window=9)
    yield _attention(kernels, random, "float8_e4m3", softcap=None, window=9)


def _rotation(kernels: Kernels, random: Callable[..., Tensor]) -> Trial:
    x, cos, sin = random(3, 2, 24), random(3, 1, 16), random(3, 1, 16)
    turning = x[..., :16]
    swapped = torch.cat((turning[..., 8:], turning[..., :8]), dim=-1)
    expected = torch.cat((turning * cos + swapped * sin, x[..., 16:]), dim=-1)
    kernels.rotate(x, cos, sin)
    return Trial("rotate", x, expected)


def _attention(
    kernels: Kernels, random: Callable[..., Tensor], dtype: str, *, softcap: float | None, window: int | None
) -> Trial:
    """The last five of a request's 21 tokens, in scattered blocks of 8, with 4 query heads on 2 KV heads."""
    size, dim, tokens = 8, 24, 21
    width = {"float32": 4 * dim, "int8": dim + 4, "float8_e4m3": dim}[dtype]
    pool = torch.zeros(5, 2, 2, size, width, dtype=torch.uint8)
    cells = Cells(pool.data_ptr(), 4 * size * width, 2, size, dim, dtype)
    q, k, v = random(5, 4, dim), random(tokens, 2, dim), random(tokens, 2, dim)
    table, places = torch.tensor([[3, 0, 4]]), torch.arange(tokens)
    kernels.store_kv(cells, k, v, table[0][places // size], places % size)
    asked = places[-5:]
    got = kernels.attend(
        cells, q, table, torch.zeros(5, dtype=torch.int64), asked, torch.tensor([0, 5]), window, 0.2, softcap
    )
    k, v = (_as_stored(each, dtype) for each in (k, v))
    scores = torch.einsum("qgd,kgd->gqk", q, k.repeat_interleave(2, dim=1)) * 0.2
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    back = asked[:, None] - places[None]
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    expected = torch.einsum("gqk,kgd->qgd", weights, v.repeat_interleave(2, dim=1))
    return Trial("attend", got, expected.reshape(5, -1))


def _as_stored(x: Tensor, dtype: str) -> Tensor:
    if dtype == "float32":
        return x
    if dtype == "float8_e4m3":
        return to_fp8(x).float()
    scales = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scales).round() * scales
