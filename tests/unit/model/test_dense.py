"""fp32 products of few rows by the native kernel, of many by torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError, InternalError
from tandem.model.matrices import Dense
from tandem.native.library import Kernels


@pytest.fixture
def kernels() -> Kernels:
    try:
        return Kernels(threads=2)
    except ConfigError as error:
        pytest.skip(str(error))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (5, 53), (16, 64), (49, 577), (130, 1536)])
def test_a_product_is_torchs_and_of_each_row_alone(kernels: Kernels, outputs: int, inputs: int) -> None:
    weight, bias = draw(outputs, inputs), draw(outputs)
    for rows, used in product((1, 2, 3, 4, 31), (bias, None)):
        x = draw(rows, inputs)
        got = kernels.linear_dense(x, weight, used)
        assert torch.allclose(got, F.linear(x, weight, used), atol=1e-4)
        alone = [kernels.linear_dense(row.unsqueeze(0), weight, used) for row in x]
        assert torch.equal(got, torch.cat(alone))


def test_of_many_rows_it_is_torchs_own_product(kernels: Kernels) -> None:
    weight, x = draw(20, 64), draw(200, 64)
    dense = Dense(weight, None, kernels)
    assert torch.equal(dense(x), F.linear(x, weight))
    assert torch.equal(dense(x[:7]), kernels.linear_dense(x[:7], weight, None))


def test_a_matrix_that_lies_otherwise_is_refused(kernels: Kernels) -> None:
    for weight in (draw(64, 20).t(), draw(20, 64).double()):
        with pytest.raises(InternalError, match="contiguous fp32"):
            kernels.linear_dense(draw(2, 64), weight, None)
