"""What only a GPU can show: its kernels are right, and recorded steps give the tokens of launched ones."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.attention.paged_check import kernel_error, plain_attention
from tandem.engine.attention.paged_kernels import PagedPath, available_kernels
from tandem.engine.attention.varlen_attention import PagedKernel
from tandem.engine.device.sampler import sample_on_device
from tandem.engine.device.sampler_choice import choose_draw_rows
from tandem.engine.factory import Rank
from tandem.engine.kv_pool import DTYPES
from tandem.engine.tp_group import TpGroup
from tandem.errors import ConfigError
from tandem.grammar.constraint import regex
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import AttentionParams
from tandem.model.device_matrices import checked_rows, quantised_rows
from tandem.model.device_ops import choose_ops
from tandem.model.fp8 import FP8, to_fp8
from tandem.model.ops import TORCH_OPS
from tandem.request import SamplingParams
from tandem.sampling.sampler import choose
from tandem.testing.engine import EagerRecorder, EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.gpu.conftest import DEVICE, NEEDS_CUDA, ON_GPU, VOCAB, make_recorder
from tests.unit.engine.test_device_sampler import draw_of, rows_of_all_kinds

pytestmark = pytest.mark.gpu
KNOWS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
NEEDS_ADA = "fp8 needs a GPU of compute capability 8.9"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12)
FLOAT32: dict[str, Any] = {"device": str(DEVICE), "max_running_requests": 11, "max_model_tokens": 400}
HALF = FLOAT32 | {"dtype": "bfloat16"}


def half_kernel() -> PagedKernel:
    return next(available_kernels(DEVICE, torch.bfloat16))[1] if ON_GPU else plain_attention


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


@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_element_wise_work_is_tritons_for_it_is_right(dtype: torch.dtype) -> None:
    assert choose_ops(None, DEVICE, dtype) is not TORCH_OPS


@NEEDS_CUDA
@pytest.mark.parametrize("vocab", [VOCAB, 50_257, 128_256])
def test_tokens_are_drawn_by_triton_as_by_the_host(vocab: int) -> None:
    """Each row also alone, and none is left for the host to decide."""
    draw_rows = choose_draw_rows(DEVICE, vocab)
    assert draw_rows is not None
    logits, params = rows_of_all_kinds(64, vocab, vocab)
    expected = [choose(row.numpy(), each, 9).token_id for row, each in zip(logits, params, strict=True)]
    there = logits.to(DEVICE)
    best = there.argmax(dim=1)
    draws = {row: draw_of(each, 9) for row, each in enumerate(params)}
    assert sample_on_device(there, best, draws, best, draw_rows=draw_rows).tokens.tolist() == expected
    for row, draw in draws.items():
        own = best[row : row + 1]
        alone = sample_on_device(there[row : row + 1], own, {0: draw}, own, draw_rows=draw_rows)
        assert alone.tokens.tolist() == expected[row : row + 1]


@pytest.mark.parametrize("count", [1, 3, 11])
def test_recorded_steps_give_the_tokens_of_launched_ones_and_of_gathered_blocks(
    model_dir: Path, tmp_path: Path, count: int
) -> None:
    """In fp32, where no paged kernel is chosen: by the plain way."""
    gathered = single_rank(model_dir, tmp_path / "g", **FLOAT32)
    assert gathered.runner.graphs is None
    launched = single_rank(model_dir, tmp_path / "l", paged=PagedPath(plain_attention, None), **FLOAT32)
    recorded = single_rank(model_dir, tmp_path / "r", paged=PagedPath(plain_attention, make_recorder()), **FLOAT32)
    expected = answers(gathered, count)
    assert answers(launched, count) == expected
    assert answers(recorded, count) == expected


def test_constrained_answers_are_chosen_on_the_device_as_by_the_host(tmp_path: Path) -> None:
    """Masks come after the step was launched, and go to the device packed."""
    model_dir = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1, eos_token_id=2)
    bound = replace(SEEDED, grammar=regex("[a-z]{8}( [a-z]{4,9}){3,9}", "regex").grammar, max_tokens=60)
    found = []
    for paged in (None, PagedPath(plain_attention, None), PagedPath(plain_attention, make_recorder())):
        rank = single_rank(model_dir, tmp_path / "rendezvous", paged=paged, **FLOAT32)
        assert rank.runner.samples_on_device == (paged is not None)
        driver = EngineDriver(rank.engine)
        for number in range(8):
            sampling = replace(bound, seed=number, temperature=0.7 * (number % 2), top_k=50 if number % 3 else None)
            driver.add(str(number), random_prompt(20 + number, VOCAB, number), sampling if number else SEEDED)
        driver.run()
        assert driver.at_rest()
        found.append((driver.tokens, driver.ends))
    assert found[1:] == found[:1] * 2


def test_a_recorded_step_survives_preemption(model_dir: Path, tmp_path: Path) -> None:
    paged = PagedPath(plain_attention, make_recorder())
    small = single_rank(model_dir, tmp_path / "s", paged=paged, kv_blocks=20, max_step_tokens=64, **FLOAT32)
    large = single_rank(model_dir, tmp_path / "l", **FLOAT32)
    drivers = EngineDriver(small.engine), EngineDriver(large.engine)
    for driver in drivers:
        for number in range(6):
            driver.add(str(number), random_prompt(30, VOCAB, number), replace(GREEDY, max_tokens=60))
        driver.run()
    assert small.engine.preemptions
    assert drivers[0].tokens == drivers[1].tokens


@pytest.mark.parametrize("count", [1, 3, 11])
def test_in_half_precision_recorded_steps_give_the_tokens_of_launched_ones(
    model_dir: Path, tmp_path: Path, count: int
) -> None:
    """With the same kernel, and in steps of the same sizes: others may be rounded in another way."""
    recorded = single_rank(model_dir, tmp_path / "r", paged=PagedPath(half_kernel(), make_recorder()), **HALF)
    launched = single_rank(model_dir, tmp_path / "l", paged=PagedPath(half_kernel(), EagerRecorder()), **HALF)
    assert answers(recorded, count) == answers(launched, count)


@pytest.mark.parametrize("count", [1, 8])
def test_in_half_precision_full_recordings_give_the_tokens_of_steps_without_any(
    model_dir: Path, tmp_path: Path, count: int
) -> None:
    """These batches fill their recordings, so both ways multiply matrices of the same sizes."""
    found = []
    for name, recorder in (("r", make_recorder()), ("l", None)):
        rank = single_rank(model_dir, tmp_path / name, paged=PagedPath(half_kernel(), recorder), **HALF)
        assert (rank.runner.graphs is None) == (recorder is None)
        driver = EngineDriver(rank.engine)
        for number in range(count):
            prompt = random_prompt(1 + 31 * number % 150, VOCAB, number)
            driver.add(str(number), prompt, replace(SEEDED if number % 2 else GREEDY, max_tokens=20))
        driver.run()
        found.append(driver.tokens)
    assert found[0] == found[1]


@NEEDS_CUDA
def test_the_kernels_of_an_8b_model_compute_what_they_should() -> None:
    check_kernels(torch.bfloat16, "auto", 16, 8, 32, 128)


def test_nccl_of_one_rank_sums_also_when_recorded(tmp_path: Path) -> None:
    """As far as one GPU goes: its library loads, makes a communicator, and is recorded into a graph."""
    group = TpGroup(tmp_path / "group", 0, 1, DEVICE)
    x = torch.arange(1000.0, device=DEVICE)

    def add() -> None:
        x.add_(1)
        group.collectives.allreduce([x]).wait()

    add()
    replay = make_recorder().record(add)
    before = x.cpu().clone()
    replay()
    assert torch.equal(before + 1, x.cpu())
    assert group.least(7) == 7


@NEEDS_CUDA
def test_in_half_precision_steps_are_recorded_and_nearly_agree_with_gathered_blocks(
    model_dir: Path, tmp_path: Path
) -> None:
    """Rounding decides some tokens, after which an answer is another: most first halves must be the same."""
    chosen = single_rank(model_dir, tmp_path / "c", **HALF)
    assert chosen.runner.graphs is not None
    plain = single_rank(model_dir, tmp_path / "p", paged=PagedPath(plain_attention, None), **HALF)
    ours, theirs = answers(chosen, 9), answers(plain, 9)
    same = [ours[name][:6] == theirs[name][:6] for name in ours]
    assert sum(same) >= 6


@pytest.mark.parametrize("pool", ["auto", "float8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [8, 16, 128])
@pytest.mark.parametrize(("kv_heads", "heads", "head_dim"), [(8, 32, 128), (1, 7, 64), (2, 6, 96), (1, 4, 256)])
@NEEDS_CUDA
def test_every_kernel_there_is_computes_what_it_should(
    dtype: torch.dtype, pool: str, page: int, kv_heads: int, heads: int, head_dim: int
) -> None:
    check_kernels(dtype, pool, page, kv_heads, heads, head_dim)


def check_kernels(dtype: torch.dtype, pool: str, page: int, kv_heads: int, heads: int, head_dim: int) -> None:
    if pool != "auto" and not KNOWS_FP8:
        pytest.skip(NEEDS_ADA)
    layout = KvPoolLayout(1, 1, kv_heads, page, head_dim, "bfloat16" if pool == "auto" else pool)
    terms = AttentionParams(heads, head_dim**-0.5, None, (None, 24, 1000))
    there = available_kernels(DEVICE, DTYPES[layout.dtype])
    found = {name: kernel_error(kernel, layout, terms, dtype, DEVICE) for name, kernel in there}
    assert found
    assert not any(found.values()), found


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs the extra tandem-serve[cuda]")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page", "kv_heads", "heads"), [(16, 8, 32), (128, 1, 4)])
def test_flashinfer_computes_what_it_should(dtype: torch.dtype, page: int, kv_heads: int, heads: int) -> None:
    vendor: Any = importlib.import_module("tandem.engine.attention.flashinfer_attention")
    layout = KvPoolLayout(1, 1, kv_heads, page, 128, "bfloat16" if dtype == torch.bfloat16 else "float16")
    terms = AttentionParams(heads, 128**-0.5, None, (None, 24, 1000))
    assert kernel_error(vendor.FlashInferAttention(layout, terms, dtype, DEVICE), layout, terms, dtype, DEVICE) is None


@NEEDS_CUDA
def test_fp8_is_rounded_as_on_a_cpu() -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 100
    x[:4] = torch.tensor([1e9, -torch.inf, torch.nan, 2**-10])
    assert torch.equal(to_fp8(x.cuda()).cpu().view(torch.uint8), to_fp8(x).view(torch.uint8))


@pytest.mark.parametrize(
    "weights", ["int8", pytest.param("fp8", marks=pytest.mark.skipif(not KNOWS_FP8, reason=NEEDS_ADA))]
)
@NEEDS_CUDA
def test_inputs_are_quantised_by_triton_as_by_torch(weights: str) -> None:
    dtype = FP8 if weights == "fp8" else torch.int8
    ours = checked_rows(dtype, DEVICE, torch.bfloat16)
    assert ours is not quantised_rows
    x = torch.randn(40, 1520, device=DEVICE, dtype=torch.bfloat16)
    x[3] = 0
    (values, scales), (expected, right) = ours(x, dtype), quantised_rows(x, dtype)
    torch.testing.assert_close(scales, right)
    assert (values.float() != expected.float()).float().mean() < 1e-3  # ties, and a division that is a bit off


@pytest.mark.skipif(KNOWS_FP8 or not torch.cuda.is_available(), reason="of GPUs before Ada")
def test_fp8_weights_are_refused_by_what_has_none(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or more") as refused:
        single_rank(model_dir, tmp_path / "r", weights="fp8", **HALF)
    assert refused.value.field == "engine.weights"


@pytest.mark.skipif(not KNOWS_FP8, reason=NEEDS_ADA)
@pytest.mark.parametrize(
    "options", [{"kv_dtype": "fp8"}, {"weights": "fp8"}, {"weights": "int8"}, {"weights": "fp8", "kv_dtype": "fp8"}]
)
def test_quantised_steps_are_recorded_and_score_prompts_much_as_full_precision_does(
    model_dir: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    sampling = replace(GREEDY, prompt_logprobs=0)
    found = []
    for own in ({}, options):
        rank = single_rank(model_dir, tmp_path / "r", **HALF | own)
        assert rank.runner.graphs is not None
        driver = EngineDriver(rank.engine)
        for number in range(9):
            driver.add(str(number), random_prompt(10 + 30 * number, VOCAB, number), sampling)
        driver.run()
        assert driver.at_rest()
        assert all(len(tokens) == GREEDY.max_tokens for tokens in driver.tokens.values())
        found.append(torch.tensor([token.logprob for name in sorted(driver.scores) for token in driver.scores[name]]))
    assert 0 < (found[0] - found[1]).abs().mean() < 0.15 * found[0].abs().mean()
