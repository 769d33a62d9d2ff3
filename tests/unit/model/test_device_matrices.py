"""Products in eight bits, by the code that runs on a GPU: torch multiplies so on a CPU too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.model.device_matrices import LARGEST, product_error, quantised_rows
from tandem.model.matrices import Dense, MatrixMaker, Weights

CPU = torch.device("cpu")
EIGHT_BITS = pytest.mark.parametrize("weights", [Weights.INT8, Weights.FP8])


def widened(x: Tensor, weights: Weights) -> Tensor:
    assert weights.row_dtype is not None
    values, scales = quantised_rows(x, weights.row_dtype)
    return values.float() * scales


@EIGHT_BITS
def test_a_row_comes_back_within_half_a_step_of_its_largest(weights: Weights) -> None:
    loudness = 10.0 ** torch.linspace(-3, 3, 64)[:, None]
    x = torch.randn(64, 96) * loudness
    largest = x.abs().amax(dim=1, keepdim=True)
    steps = largest / 127 if weights is Weights.INT8 else (x.abs() / 8).clamp_min(largest / 448 * 2**-9)
    assert ((widened(x, weights) - x).abs() <= 0.501 * steps).all()


@EIGHT_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 70])
def test_a_product_is_that_of_the_widened_numbers(weights: Weights, dtype: torch.dtype, rows: int) -> None:
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((48, 320), (48,), (rows, 320)))
    right = widened(x, weights) @ widened(weight, weights).T + bias.float()
    got = MatrixMaker(weights)(weight, bias)(x)
    assert got.dtype == dtype
    error = (got.float() - right).norm(dim=1) / right.norm(dim=1)
    assert error.max() < (1e-5 if dtype == torch.float32 else 5e-3)


@EIGHT_BITS
def test_a_row_that_is_no_number_spoils_no_other(weights: Weights) -> None:
    x = torch.randn(5, 64)
    x[1, 3], x[3, 7] = torch.nan, torch.inf
    got = MatrixMaker(weights)(torch.randn(32, 64))(x)
    assert got.isfinite().all(dim=1).tolist() == [True, False, True, False, True]


@EIGHT_BITS
def test_parts_of_rows_have_the_weights_of_whole_ones(weights: Weights) -> None:
    weight, dtype = torch.randn(32, 128), weights.row_dtype
    assert dtype is not None
    values, scales = quantised_rows(weight, dtype)
    for part in (slice(0, 64), slice(64, 128)):
        own, same = quantised_rows(weight[:, part], dtype, weight.abs().amax(dim=1))
        assert torch.equal(own.float(), values[:, part].float())
        assert torch.equal(same, scales)


@EIGHT_BITS
def test_the_vocabularys_matrix_stays_as_it_is(weights: Weights) -> None:
    assert isinstance(MatrixMaker(weights).of_vocabulary(torch.randn(37, 64)), Dense)


@EIGHT_BITS
def test_sizes_that_the_kernels_do_not_take_are_refused(weights: Weights) -> None:
    with pytest.raises(ConfigError, match="got 24 x 64") as refused:
        MatrixMaker(weights)(torch.randn(24, 64))
    assert refused.value.field == "engine.weights"


def test_only_eight_bits_are_torchs() -> None:
    with pytest.raises(ConfigError, match="int4"):
        MatrixMaker(Weights.INT4)(torch.randn(32, 64))


def test_wrong_and_unable_ones_are_found() -> None:
    def too_loud(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values, scales = quantised_rows(x, dtype)
        return values, scales * 1.1

    def unable(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel")

    for dtype in LARGEST:
        assert product_error(quantised_rows, dtype, CPU, torch.bfloat16) is None
        assert "differ" in str(product_error(too_loud, dtype, CPU, torch.bfloat16))
        assert product_error(unable, dtype, CPU, torch.bfloat16) == "RuntimeError: no kernel"


INTERPRETED = """
import torch
from tandem.model.device_matrices import product_error
from tandem.model.fp8 import FP8
from tandem.model.triton_ops import quantised_rows

cpu = torch.device("cpu")
print(*(product_error(quantised_rows, torch.int8, cpu, each) for each in (torch.float32, torch.bfloat16)))
codes = torch.arange(127, dtype=torch.uint8).view(FP8)
values, scales = quantised_rows(torch.stack((codes.float(), -2 * codes.float())), FP8)
print(torch.equal(values.float(), torch.stack((codes.float(), -codes.float()))), scales.flatten().tolist())
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for GPUs")
def test_rows_are_quantised_rightly_by_triton() -> None:
    """By its interpreter, which rounds up to powers of two wrongly in fp8: there only what needs no rounding."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("None None\nTrue [1.0, 2.0]\n", 0), done.stderr
