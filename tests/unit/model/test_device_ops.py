"""Element-wise work of a GPU's own is taken only where it gives what torch does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tandem.model.device_ops import choose_ops, ops_error
from tandem.model.ops import TORCH_OPS, TorchOps

CPU = torch.device("cpu")


class Careless(TorchOps):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight


class Unable(TorchOps):
    def gated(self, gate_up: Tensor, activation: object) -> Tensor:
        raise RuntimeError("no C compiler")


def test_wrong_and_unable_ones_are_found() -> None:
    assert ops_error(TORCH_OPS, CPU, torch.float32) is None
    assert ops_error(TORCH_OPS, CPU, torch.bfloat16) is None
    assert "differ" in str(ops_error(Careless(), CPU, torch.float32))
    assert ops_error(Unable(), CPU, torch.float32) == "RuntimeError: no C compiler"
    assert choose_ops(None, CPU, torch.float32) is TORCH_OPS


INTERPRETED = """
import torch
from tandem.model.device_ops import ops_error
from tandem.model.triton_ops import TritonOps

print(*(ops_error(TritonOps(), torch.device("cpu"), dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for GPUs")
def test_those_of_triton_are_right() -> None:
    """By Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("None None None\n", 0), done.stderr
