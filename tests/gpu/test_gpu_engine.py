"""What only a GPU can show: its kernels are right, and recorded steps give the tokens of launched ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine.decode_graphs import CudaRecorder
from tandem.engine.factory import Rank
from tandem.engine.paged_check import fault, plain_attention
from tandem.engine.paged_kernels import PagedPath, kernels_there
from tandem.engine.testing import EngineDriver, single_rank
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import AttentionTerms
from tandem.model.device_ops import choose_ops
from tandem.model.ops import TORCH_OPS
from tandem.request import SamplingParams
from tandem.testing import random_prompt, write_tiny_llama

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")
VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12)
FLOAT32 = {"device": "cuda:0", "max_running_requests": 11, "max_model_tokens": 400}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, head_dim=64, seed=1)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Tokens are compared: fp32 must not become TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def answers(rank: Rank, count: int) -> dict[str, list[int]]:
    """Half of the requests come while the others decode."""
    driver = EngineDriver(rank.engine)
    for number in range(count):
        if number > count // 2:
            driver.take(driver.engine.step())
        prompt = random_prompt(1 + 31 * number % 150, VOCAB, number)
        driver.add(str(number), prompt, GREEDY if number % 3 else SEEDED)
    driver.run()
    assert driver.at_rest()
    return driver.tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [8, 16, 128])
@pytest.mark.parametrize(("kv_heads", "heads", "head_dim"), [(8, 32, 128), (1, 7, 64), (2, 6, 96), (1, 4, 256)])
def test_every_kernel_there_is_computes_what_it_should(
    dtype: torch.dtype, page: int, kv_heads: int, heads: int, head_dim: int
) -> None:
    layout = KvPoolLayout(1, 1, kv_heads, page, head_dim, "bfloat16")
    terms = AttentionTerms(heads, head_dim**-0.5, None, (None, 24, 1000))
    found = {name: fault(kernel, layout, terms, dtype, CUDA) for name, kernel in kernels_there(CUDA)}
    assert found
    assert not any(found.values()), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_element_wise_work_is_tritons_for_it_is_right(dtype: torch.dtype) -> None:
    assert choose_ops(None, CUDA, dtype) is not TORCH_OPS


@pytest.mark.parametrize("count", [1, 3, 11])
def test_recorded_steps_give_the_tokens_of_launched_ones_and_of_gathered_blocks(
    model_dir: Path, tmp_path: Path, count: int
) -> None:
    """In fp32, where no paged kernel is chosen: by the plain way."""
    gathered = single_rank(model_dir, tmp_path / "g", **FLOAT32)
    assert gathered.runner.graphs is None
    launched = single_rank(model_dir, tmp_path / "l", paged=PagedPath(plain_attention, None), **FLOAT32)
    recorded = single_rank(model_dir, tmp_path / "r", paged=PagedPath(plain_attention, CudaRecorder(CUDA)), **FLOAT32)
    expected = answers(gathered, count)
    assert answers(launched, count) == expected
    assert answers(recorded, count) == expected


def test_a_recorded_step_survives_preemption(model_dir: Path, tmp_path: Path) -> None:
    paged = PagedPath(plain_attention, CudaRecorder(CUDA))
    small = single_rank(model_dir, tmp_path / "s", paged=paged, kv_blocks=20, max_step_tokens=64, **FLOAT32)
    large = single_rank(model_dir, tmp_path / "l", **FLOAT32)
    drivers = EngineDriver(small.engine), EngineDriver(large.engine)
    for driver in drivers:
        for number in range(6):
            driver.add(str(number), random_prompt(30, VOCAB, number), replace(GREEDY, max_tokens=60))
        driver.run()
    assert small.engine.preemptions
    assert drivers[0].tokens == drivers[1].tokens


def test_in_half_precision_steps_are_recorded_and_nearly_agree_with_gathered_blocks(
    model_dir: Path, tmp_path: Path
) -> None:
    """Rounding decides some tokens, after which an answer is another: most first halves must be the same."""
    half = FLOAT32 | {"dtype": "bfloat16"}
    chosen = single_rank(model_dir, tmp_path / "c", **half)
    assert chosen.runner.graphs is not None
    plain = single_rank(model_dir, tmp_path / "p", paged=PagedPath(plain_attention, None), **half)
    ours, theirs = answers(chosen, 9), answers(plain, 9)
    same = [ours[name][:6] == theirs[name][:6] for name in ours]
    assert sum(same) >= 6
