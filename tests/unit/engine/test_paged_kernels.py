"""A GPU's kernel is taken only where it knows the model and computes what it should."""

from __future__ import annotations

import importlib
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

from tandem.engine.attention.paged_check import kernel_error, plain_attention, store_error
from tandem.engine.attention.paged_kernels import choose_paged_path, unsupported_reason
from tandem.engine.attention.varlen_attention import store_by_torch
from tandem.engine.factory import Rank
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import AttentionParams, Decoder
from tandem.testing.engine import single_rank
from tests.conftest import write_family

CPU = torch.device("cpu")
LAYOUT = KvPoolLayout(num_blocks=8, layers=1, kv_heads=2, block_tokens=16, head_dim=16, dtype="bfloat16")
FP8_LAYOUT = replace(LAYOUT, dtype="float8_e4m3")
TERMS = AttentionParams(heads=6, scale=0.25, softcap=None, windows=(None, 24))


def test_the_plain_way_is_right_by_definition_and_wrong_ones_are_found() -> None:
    def forgets_the_window(*args: Any, **options: Any) -> Tensor:
        return plain_attention(*args, **options | {"window_size": (-1, 0)})

    def leaves_a_row_out(*args: Any, **options: Any) -> Tensor:
        out = plain_attention(*args, **options)
        out[-1] = torch.nan
        return out

    def cannot(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("out of shared memory")

    class FailsLater(Tensor):
        """As on a GPU: the error shows when the host waits for the result."""

        def __float__(self) -> float:
            raise RuntimeError("an illegal memory access")

    def fails_later(*args: Any, **options: Any) -> Tensor:
        return plain_attention(*args, **options).as_subclass(FailsLater)

    assert kernel_error(plain_attention, LAYOUT, TERMS, torch.float32, CPU) is None
    assert kernel_error(plain_attention, FP8_LAYOUT, TERMS, torch.bfloat16, CPU) is None
    assert "differ" in str(kernel_error(forgets_the_window, LAYOUT, TERMS, torch.float32, CPU))
    assert "differ" in str(kernel_error(leaves_a_row_out, LAYOUT, TERMS, torch.float32, CPU))
    assert kernel_error(cannot, LAYOUT, TERMS, torch.float32, CPU) == "RuntimeError: out of shared memory"
    late = kernel_error(fails_later, LAYOUT, TERMS, torch.float32, CPU)
    assert late == "RuntimeError: an illegal memory access"


def test_kernels_are_called_as_torchs_own_is() -> None:
    varlen = importlib.import_module("torch.nn.attention.varlen")  # slow to import, so only here
    theirs = inspect.signature(varlen.varlen_attn).parameters
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
from tandem.engine.attention.paged_check import BATCHES, kernel_error
from tandem.engine.attention.triton_attention import TritonAttention
from tests.unit.engine.test_paged_kernels import CPU, LAYOUT, SMALL, TERMS

processors, page, kv_heads, heads, head_dim = map(int, sys.argv[3:])
layout = replace(LAYOUT, block_tokens=page, kv_heads=kv_heads, head_dim=head_dim, dtype=sys.argv[2])
kernel, batches = TritonAttention(processors), BATCHES if sys.argv[1] == "large" else SMALL
print(kernel_error(kernel, layout, replace(TERMS, heads=heads), torch.float32, CPU, batches))
"""

# Decode steps with one long sequence, alike ones and few keys, and mixed ones with a long sequence and short prompts.
SMALL = ([(1, 9), (1, 700), (1, 130)], [(1, 64), (1, 65), (1, 63)], [(1, 1)], [(1, 8), (1, 500), (33, 33), (5, 300)])
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: make setup installs it on Linux"
)


def interpreted(program: str, *arguments: str) -> str:
    """The output of a program whose Triton kernels are interpreted, which knows no products in half precision."""
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if "only 0-dimensional arrays" in done.stdout:
        pytest.skip("this Triton's interpreter cannot loop with this numpy")
    assert done.returncode == 0, done.stderr
    return done.stdout


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("dtype", "sizes"),  # of the pool; the GPU's processors, tokens of a block, KV heads, query heads, dimensions
    [
        pytest.param("float32", (3, 16, 1, 3, 16), marks=pytest.mark.slow),
        pytest.param("float8_e4m3", (1, 8, 2, 2, 24), marks=pytest.mark.slow),
    ],
)
def test_the_triton_kernel_is_right(dtype: str, sizes: tuple[int, ...]) -> None:
    assert interpreted(INTERPRETED, "small", dtype, *map(str, sizes)) == "None\n"


@NEEDS_TRITON
@pytest.mark.soak_only  # half a minute each
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float32", (132, 16, 2, 6, 16)),
        ("float32", (1, 8, 1, 4, 24)),
        ("float32", (20, 128, 2, 2, 32)),
        ("float32", (132, 32, 1, 1, 160)),
        ("float8_e4m3", (132, 16, 2, 6, 24)),
    ],
)
def test_the_triton_kernel_is_right_for_the_batches_of_a_start(dtype: str, sizes: tuple[int, ...]) -> None:
    assert interpreted(INTERPRETED, "large", dtype, *map(str, sizes)) == "None\n"


STORES = """
from dataclasses import replace
import torch
from tandem.engine.attention.paged_check import store_error
from tandem.engine.attention.triton_attention import TritonAttention
from tests.unit.engine.test_paged_kernels import CPU, LAYOUT

for layout in (LAYOUT, replace(LAYOUT, kv_heads=3, head_dim=24)):
    print(store_error(TritonAttention.store, layout, torch.bfloat16, CPU))
"""


@NEEDS_TRITON
def test_triton_stores_keys_and_values_as_torch_does() -> None:
    """Not in fp8, which the interpreter rounds in its own way."""
    assert interpreted(STORES).split() == ["None"] * 2


def test_a_wrong_store_is_found() -> None:
    def one_cell_off(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        store_by_torch(keys, values, k, v, blocks, offsets ^ 1)

    def cannot(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        raise RuntimeError("no C compiler")

    assert store_error(store_by_torch, LAYOUT, torch.bfloat16, CPU) is None
    assert store_error(store_by_torch, FP8_LAYOUT, torch.bfloat16, CPU) is None
    assert store_error(one_cell_off, LAYOUT, torch.bfloat16, CPU) == "it writes other values"
    assert store_error(cannot, LAYOUT, torch.bfloat16, CPU) == "RuntimeError: no C compiler"


SPLITS = """
import torch
from tandem.engine.attention.paged_check import kernel_error
from tandem.engine.attention.triton_attention import TritonAttention
from tests.unit.engine.test_paged_kernels import CPU, LAYOUT, TERMS
from dataclasses import replace

layout, terms = replace(LAYOUT, kv_heads=1, dtype="float32"), replace(TERMS, heads=2, windows=(None,))
for processors, batch in (
    (2, [(1, 600), (1, 9), (1, 9), (1, 9)]),  # one long sequence among four, for two processors
    (2, [(1, 600), (3, 9), (40, 40)]),  # the same beside prompts
    (2, [(1, 100), (1, 110), (1, 120), (1, 128)]),  # alike: each has a program
):
    kernel = TritonAttention(processors)
    assert kernel_error(kernel, layout, terms, torch.float32, CPU, [batch]) is None
    [memory] = kernel._memory.values()
    memory.fill_(torch.nan)
    assert kernel_error(kernel, layout, terms, torch.float32, CPU, [batch]) is None
    parts = memory[: -memory.numel() // 18 * 2].view(-1, layout.head_dim)
    print((~parts.isnan().any(dim=1)).sum().item() // terms.heads)
kernel = TritonAttention(3)
for batch in ([(1, 700)], [(1, 40), (1, 90)], [(1, 5)] * 5):
    kernel_error(kernel, layout, terms, torch.float32, CPU, [batch])
print(len(kernel._memory))
"""


@NEEDS_TRITON
@pytest.mark.slow
def test_a_long_sequence_is_split_in_any_batch_and_all_batches_share_the_memory() -> None:
    """Parts of tiles, where most programs would else wait for the longest sequence."""
    *parts, memories = map(int, interpreted(SPLITS).split())
    assert parts[0] >= 3
    assert parts[1] >= 3
    assert parts[2] == 0
    assert memories == 1


def model_of(rank: Rank) -> Decoder:
    return rank.runner._model


def test_models_no_paged_kernel_takes_are_refused_with_the_reason(tmp_path: Path) -> None:
    capped = model_of(single_rank(write_family(tmp_path / "gemma2", "gemma2"), tmp_path / "c"))
    plain = model_of(single_rank(write_family(tmp_path / "mistral", "mistral"), tmp_path / "p"))
    assert unsupported_reason(plain, LAYOUT, torch.bfloat16) is None
    assert unsupported_reason(plain, FP8_LAYOUT, torch.float16) is None
    assert unsupported_reason(capped, LAYOUT, torch.bfloat16) == "the model caps its scores"
    assert "float32" in str(unsupported_reason(plain, replace(LAYOUT, dtype="float32"), torch.float32))
    assert "int8" in str(unsupported_reason(plain, replace(LAYOUT, dtype="int8"), torch.bfloat16))
    assert "20 dimensions" in str(unsupported_reason(plain, replace(LAYOUT, head_dim=20), torch.bfloat16))
    assert choose_paged_path(plain, LAYOUT, torch.bfloat16, CPU) is None
