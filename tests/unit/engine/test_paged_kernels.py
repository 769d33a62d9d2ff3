"""A GPU's kernel is taken only where it knows the model and computes what it should."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tandem.engine.attention.paged_check import fault, plain_attention
from tandem.engine.attention.paged_kernels import choose_paged_path, refusal
from tandem.engine.factory import Rank
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import AttentionTerms, Decoder
from tandem.testing.engine import single_rank
from tests.conftest import write_family

CPU = torch.device("cpu")
LAYOUT = KvPoolLayout(num_blocks=8, layers=1, kv_heads=2, block_tokens=16, head_dim=16, dtype="bfloat16")
FP8_LAYOUT = replace(LAYOUT, dtype="float8_e4m3")
TERMS = AttentionTerms(heads=6, scale=0.25, softcap=None, windows=(None, 24))


def test_the_plain_way_is_right_by_definition_and_wrong_ones_are_found() -> None:
    def forgets_the_window(*args: Any, **options: Any) -> Tensor:
        return plain_attention(*args, **options | {"window_size": (-1, 0)})

    def leaves_a_row_out(*args: Any, **options: Any) -> Tensor:
        out = plain_attention(*args, **options)
        out[-1] = torch.nan
        return out

    def cannot(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("out of shared memory")

    assert fault(plain_attention, LAYOUT, TERMS, torch.float32, CPU) is None
    assert fault(plain_attention, FP8_LAYOUT, TERMS, torch.bfloat16, CPU) is None
    assert "differ" in str(fault(forgets_the_window, LAYOUT, TERMS, torch.float32, CPU))
    assert "differ" in str(fault(leaves_a_row_out, LAYOUT, TERMS, torch.float32, CPU))
    assert fault(cannot, LAYOUT, TERMS, torch.float32, CPU) == "RuntimeError: out of shared memory"


def test_kernels_are_called_as_torchs_own_is() -> None:
    theirs = inspect.signature(varlen_attn).parameters
    if "block_table" not in theirs:
        pytest.skip("pages came with torch 2.12")
    ours = inspect.signature(plain_attention).parameters
    assert [*ours] == [name for name in theirs if name in ours]
    assert all(ours[name].kind == theirs[name].kind for name in ours)
    required = {name for name, each in theirs.items() if each.default is inspect.Parameter.empty}
    assert required <= ours.keys()


INTERPRETED = """
import sys
from dataclasses import replace
import torch
from tandem.engine.attention.paged_check import fault
from tandem.engine.attention.triton_attention import TritonAttention
from tests.unit.engine.test_paged_kernels import CPU, LAYOUT, TERMS

processors, page, kv_heads, heads, head_dim = map(int, sys.argv[2:])
layout = replace(LAYOUT, block_tokens=page, kv_heads=kv_heads, head_dim=head_dim, dtype=sys.argv[1])
print(fault(TritonAttention(processors), layout, replace(TERMS, heads=heads), torch.float32, CPU))
"""


@pytest.mark.soak_only  # half a minute each
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for GPUs")
@pytest.mark.parametrize(
    ("dtype", "sizes"),  # of the pool; the GPU's processors, tokens of a block, KV heads, query heads, dimensions
    [
        ("float32", (132, 16, 2, 6, 16)),
        ("float32", (1, 8, 1, 4, 24)),
        ("float32", (20, 128, 2, 2, 32)),
        ("float32", (132, 32, 1, 1, 160)),
        ("float8_e4m3", (132, 16, 2, 6, 24)),
    ],
)
def test_the_triton_kernel_is_right(dtype: str, sizes: tuple[int, ...]) -> None:
    """By Triton's interpreter, which knows no products in half precision."""
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED, dtype, *map(str, sizes)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "only 0-dimensional arrays" in done.stdout:
        pytest.skip("this Triton's interpreter cannot loop with this numpy")
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


def model_of(rank: Rank) -> Decoder:
    return rank.runner._model


def test_models_no_paged_kernel_takes_are_refused_with_the_reason(tmp_path: Path) -> None:
    capped = model_of(single_rank(write_family(tmp_path / "gemma2", "gemma2"), tmp_path / "c"))
    plain = model_of(single_rank(write_family(tmp_path / "mistral", "mistral"), tmp_path / "p"))
    assert refusal(plain, LAYOUT, torch.bfloat16) is None
    assert refusal(plain, FP8_LAYOUT, torch.float16) is None
    assert refusal(capped, LAYOUT, torch.bfloat16) == "the model caps its scores"
    assert "float32" in str(refusal(plain, replace(LAYOUT, dtype="float32"), torch.float32))
    assert "int8" in str(refusal(plain, replace(LAYOUT, dtype="int8"), torch.bfloat16))
    assert "20 dimensions" in str(refusal(plain, replace(LAYOUT, head_dim=20), torch.bfloat16))
    assert choose_paged_path(plain, LAYOUT, torch.bfloat16, CPU) is None
