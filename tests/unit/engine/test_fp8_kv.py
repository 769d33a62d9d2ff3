"""KV in fp8 is torch's e4m3, bit for bit, whoever stores it, and whoever attends reads the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.config.engine import EngineSpec
from tandem.engine.attention.attention import StepAttention
from tandem.engine.attention.native_attention import NativeStepAttention
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.varlen_attention import PagedBatch, StepRows, VarlenAttention
from tandem.engine.kv_pool import DTYPES, block_layout
from tandem.engine.step import SequenceStep
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Attend, AttentionParams
from tandem.model.fp8 import FP8, to_fp8
from tandem.native.library import Kernels
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import write_family
from tests.unit.engine.test_native_attention import Attended

CODES = torch.arange(256, dtype=torch.uint8)
KNOWN = CODES.view(FP8).float()
DIM, SIZE = 8, 8


def through_kernels(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [tokens, DIM] → the codes they are stored in, and each as the only value there is to attend to."""
    tokens = len(x)
    layout = KvPoolLayout(-(-tokens // SIZE), 1, 1, SIZE, DIM, "float8_e4m3")
    pool = torch.zeros(layout.shape, dtype=FP8)
    sequences = [SequenceStep(token_ids=[0], start=0, blocks=[block], samples=1) for block in range(layout.num_blocks)]
    attend = NativeStepAttention(Kernels(1), pool, layout, sequences, AttentionParams(1, 1.0, None, (None,)))
    rows = torch.zeros(layout.num_blocks, SIZE, DIM)
    rows.view(-1, DIM)[:tokens] = x
    seen = []
    codes = torch.zeros(layout.num_blocks, SIZE, DIM, dtype=torch.uint8)
    for place in range(SIZE):  # each block's first token is what its sequence is made of
        row = rows[:, place : place + 1]
        seen.append(attend(0, torch.zeros_like(row), torch.zeros_like(row), row))
        codes[:, place] = pool.view(torch.uint8)[:, 0, 1, 0, 0]
    return codes.view(-1, DIM)[:tokens], torch.stack(seen, dim=1).view(-1, DIM)[:tokens]


def test_every_code_is_kept_and_read_as_it_is() -> None:
    codes, seen = through_kernels(KNOWN.view(-1, DIM))
    assert torch.equal(codes.flatten(), CODES)
    torch.testing.assert_close(seen.flatten(), KNOWN, atol=0.0, rtol=0.0, equal_nan=True)


def test_numbers_are_rounded_as_torch_rounds_and_stop_at_the_largest() -> None:
    draw = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=draw).to(torch.int32).view(torch.float32)
    usual = torch.randn(1 << 16, generator=draw) * torch.randint(-14, 10, (1 << 16,), generator=draw).float().exp2()
    finite = KNOWN[KNOWN.isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    up, down = (torch.nextafter(halves, torch.tensor(way)) for way in (torch.inf, -torch.inf))
    edges = [0.0, -0.0, 448.0, 448.1, 464.0, 465.0, 1e30, 2**-10, 1e-40, torch.inf, torch.nan]
    x = torch.cat((any_bits, usual, halves, up, down, torch.tensor(edges), -torch.tensor(edges)))
    x = torch.cat((x, torch.zeros(-len(x) % DIM)))
    codes, _ = through_kernels(x.view(-1, DIM))
    expected = to_fp8(x).view(torch.uint8)
    assert torch.equal(codes.flatten() & 0x7F, expected & 0x7F)
    assert torch.equal(codes.flatten()[x.isfinite()], expected[x.isfinite()])  # NaN may have either sign
    assert to_fp8(torch.tensor([-1e30, 1e30])).float().tolist() == [-448.0, 448.0]
    assert to_fp8(torch.tensor([torch.inf, -torch.inf, torch.nan])).float().isnan().all()


@pytest.mark.parametrize(("window", "loud"), [(None, 1.0), (50, 1.0), (7, 300.0)])
def test_every_way_of_attention_stores_the_same_and_answers_alike(window: int | None, loud: float) -> None:
    attended = Attended((6, 2, 64, 16), window, None, "float8_e4m3")
    layout, terms, pools, answers = attended.layout, attended.terms, [], []

    def ways(pool: Tensor, steps: list[SequenceStep]) -> list[Attend]:
        rows = StepRows.of(steps, layout.block_tokens, layout.num_blocks)
        batch = PagedBatch.of(rows, pool.device)
        return [
            StepAttention(pool, layout, steps, terms),
            NativeStepAttention(Kernels(2), pool, layout, steps, terms),
            VarlenAttention(plain_attention, pool, batch, terms),
        ]

    for way in range(3):
        pool = torch.zeros(layout.shape, dtype=DTYPES[layout.dtype])
        for steps, (q, k, v) in zip((attended.prefixes, attended.steps), attended.rows, strict=True):
            answer = ways(pool, steps)[way](1, q / loud, k, loud * v)
        pools.append(pool.view(torch.uint8))
        answers.append(answer / loud)
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])
    assert (pools[0].view(FP8).float().abs().max() == 448) == (loud > 1)
    torch.testing.assert_close(answers[1], answers[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(answers[2], answers[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_models_of_any_dtype_answer_over_it(tmp_path: Path, dtype: str) -> None:
    """By torch over gathered blocks, as on a GPU without a paged kernel; much as over the model's own dtype."""
    folder, prompt = write_tiny_llama(tmp_path / "m", vocab=300), random_prompt(60, 300)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
    found = []
    for kv_dtype in ("auto", "fp8"):
        rank = single_rank(folder, tmp_path / "r", dtype=dtype, kernels="torch", kv_dtype=kv_dtype)
        driver = EngineDriver(rank.engine)
        driver.add("r", prompt, sampling)
        driver.run()
        assert driver.at_rest()
        assert len(driver.tokens["r"]) == 4
        found.append(torch.tensor([token.logprob for token in driver.scores["r"]]))
    assert 0 < (found[0] - found[1]).abs().mean() < 0.1 * found[0].abs().mean()


@pytest.mark.parametrize(("family", "warned"), [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_keys_with_a_bias_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, warned: bool
) -> None:
    single_rank(write_family(tmp_path / "m", family), tmp_path / "r", kv_dtype="fp8")
    assert ("keys with a bias" in caplog.text) == warned


def test_a_block_takes_a_byte_for_each_element() -> None:
    spec = EngineSpec(kv_dtype="fp8", kv_blocks=8)
    layout = block_layout(spec, layers=2, kv_heads=3, head_dim=64)
    assert layout.block_bytes == 2 * 2 * 3 * 16 * 64
    assert replace(layout, dtype="float32").block_bytes == 4 * layout.block_bytes
