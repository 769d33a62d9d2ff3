from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtransfer.pool.quantise import dequantise, quantise, quantised_bytes
from tandem.kvcache.layout import KvPoolLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(dtype: str) -> KvPoolLayout:
    return KvPoolLayout(8, 2, 3, 4, 64, dtype)


def packed(values: torch.Tensor, dtype: str) -> np.ndarray:
    return values.to(DTYPES[dtype]).view(torch.uint8).reshape(-1).numpy()


def unpacked(data: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(data.copy()).view(DTYPES[dtype]).reshape(-1, 64).float()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_values_come_back_within_half_a_step_of_their_row(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    loudness = 10.0 ** torch.linspace(-3, 3, 96)[:, None]
    values = torch.randn(96, 64, generator=generator) * loudness
    source = packed(values, dtype)
    wire = quantise(source, layout(dtype))
    assert wire.nbytes == quantised_bytes(source.nbytes, layout(dtype))
    exact, back = unpacked(source, dtype), unpacked(dequantise(wire, layout(dtype)), dtype)
    step = exact.abs().amax(dim=1, keepdim=True) / 127
    rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    assert ((back - exact).abs() <= step * 0.501 + exact.abs() * rounding).all()


def test_it_takes_a_quarter_of_float32_and_half_of_bfloat16() -> None:
    for dtype, share in (("float32", 0.27), ("bfloat16", 0.54)):
        size = 1000 * layout(dtype).token_bytes
        assert quantised_bytes(size, layout(dtype)) / size < share


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_arrives_as_nan_and_spreads_no_further(dtype: str, broken: float) -> None:
    values = torch.ones(3, 64)
    values[0] = 0.0
    values[1, 5] = broken
    back = unpacked(dequantise(quantise(packed(values, dtype), layout(dtype)), layout(dtype)), dtype)
    assert (back[0] == 0).all()
    assert back[1].isnan().all()
    assert torch.allclose(back[2], values[2])
