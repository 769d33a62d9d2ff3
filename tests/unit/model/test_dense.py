"""fp32 products by the native kernel, and by torch where that is faster."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError, InternalError
from tandem.model.matrices import Dense
from tandem.native.library import Kernels, rows_for_kernels


@pytest.fixture(params=[8, 16])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        return Kernels(threads=2, lanes=request.param)
    except ConfigError as error:
        pytest.skip(str(error))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (5, 53), (16, 64), (49, 577), (130, 1536)])
def test_a_product_is_torchs_and_of_each_row_alone(kernels: Kernels, outputs: int, inputs: int) -> None:
    weight, bias = draw(outputs, inputs), draw(outputs)
    for rows, used in product((1, 2, 3, 4, 31, 300), (bias, None)):
        x = draw(rows, inputs)
        got = kernels.linear_dense(x, weight, used)
        assert torch.allclose(got, F.linear(x, weight, used), atol=1e-4)
        alone = [kernels.linear_dense(row.unsqueeze(0), weight, used) for row in x]
        assert torch.equal(got, torch.cat(alone))


def test_of_many_rows_it_is_torchs_own_product(kernels: Kernels) -> None:
    kernels.most_dense_rows = 48
    weight, x = draw(20, 64), draw(200, 64)
    dense = Dense(weight, None, kernels)
    assert torch.equal(dense(x), F.linear(x, weight))
    assert torch.equal(dense(x[:48]), kernels.linear_dense(x[:48], weight, None))


def test_torchs_products_are_wide_on_intels_processors_only() -> None:
    wide = {"flags": "fpu avx2 avx512f avx512_vnni"}
    assert rows_for_kernels({"vendor_id": "AuthenticAMD", **wide}) == math.inf
    for cpu in ({"vendor_id": "GenuineIntel", **wide}, {"vendor_id": "AuthenticAMD", "flags": "avx2"}, {}):
        assert rows_for_kernels(cpu) == 48
    assert rows_for_kernels({"vendor_id": "GenuineIntel", "flags": "avx2 avx512f"}) == 15


def test_a_matrix_that_lies_otherwise_is_refused(kernels: Kernels) -> None:
    for weight in (draw(64, 20).t(), draw(20, 64).double()):
        with pytest.raises(InternalError, match="contiguous fp32"):
            kernels.linear_dense(draw(2, 64), weight, None)
