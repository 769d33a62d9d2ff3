"""The roofline cost model against published figures and against its own shape."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import (
    CostModel,
    PrefillWork,
    RooflineCostModel,
    StretchedCostModel,
)
from planner.shapes import DeviceShape, LinkShape, ModelShape
from tandem.errors import ConfigError

LLAMA_3_8B = ModelShape(
    layers=32, heads=32, kv_heads=8, head_dim=128, block_params=6_979_588_096, head_params=525_336_576
)
H200 = DeviceShape(flops_per_s=989e12, memory_bytes_per_s=4.8e12)
NVLINK = LinkShape(bytes_per_s=450e9)
ROOFLINE = RooflineCostModel(LLAMA_3_8B, H200, NVLINK)


def cost_of(model: CostModel, tokens: int) -> float:
    return model.prefill_s(tokens, 0)


def test_llama_3_8b_keeps_131072_bytes_per_token() -> None:
    assert LLAMA_3_8B.kv_token_bytes == 131_072


def test_prefill_of_4096_tokens_takes_62_ms_at_the_peak_of_an_h200() -> None:
    assert cost_of(ROOFLINE, 4096) == pytest.approx(0.062, rel=0.02)


def test_its_kv_cache_crosses_nvlink_in_1_19_ms_and_400_gbit_in_10_7_ms() -> None:
    num_bytes = int(4096 * LLAMA_3_8B.kv_token_bytes)
    assert ROOFLINE.transfer_s(num_bytes) == pytest.approx(1.19e-3, rel=0.01)
    infiniband = replace(ROOFLINE, link=LinkShape(bytes_per_s=50e9))
    assert infiniband.transfer_s(num_bytes) == pytest.approx(10.7e-3, rel=0.01)


def test_a_transfer_over_a_link_that_hides_it_ends_with_the_prefill() -> None:
    num_bytes = int(4096 * LLAMA_3_8B.kv_token_bytes)
    hiding = LinkShape(bytes_per_s=num_bytes / ROOFLINE.prefill_s(4096, 0))
    model = replace(ROOFLINE, link=hiding)
    assert model.transfer_s(num_bytes) == pytest.approx(model.prefill_s(4096, 0))


def test_small_decode_batches_are_bound_by_reading_the_weights() -> None:
    weights_s = LLAMA_3_8B.weights_bytes / H200.memory_bytes_per_s
    assert ROOFLINE.decode_step_s(1, 0) == pytest.approx(weights_s)
    assert ROOFLINE.decode_step_s(8, 0) == pytest.approx(weights_s)


def test_large_decode_batches_are_bound_by_arithmetic() -> None:
    doubled = ROOFLINE.decode_step_s(4096, 0) / ROOFLINE.decode_step_s(2048, 0)
    assert doubled == pytest.approx(2.0)


def test_weights_in_fp8_are_multiplied_at_its_peak_and_attention_is_not() -> None:
    fp8 = replace(ROOFLINE, device=replace(H200, weight_flops_per_s=2 * H200.flops_per_s))
    assert fp8.prefill_s(4096, 0) - ROOFLINE.prefill_s(4096, 0) / 2 == pytest.approx(
        2 * LLAMA_3_8B.layers * LLAMA_3_8B.heads * LLAMA_3_8B.head_dim * 4096**2 / H200.flops_per_s / 2
    )
    assert fp8.decode_step_s(8, 0) == ROOFLINE.decode_step_s(8, 0), "bound by memory"


def test_partial_sums_cross_the_fabric_in_the_format_of_activations() -> None:
    wide = replace(ROOFLINE, tp=2, fabric=NVLINK)
    narrow = replace(wide, model=replace(LLAMA_3_8B, weight_bytes=1.0))
    alone = [replace(each, fabric=None).prefill_s(4096, 0) for each in (wide, narrow)]
    assert wide.prefill_s(4096, 0) - alone[0] == pytest.approx(narrow.prefill_s(4096, 0) - alone[1])


def test_one_token_of_prefill_costs_no_less_than_reading_the_weights() -> None:
    assert ROOFLINE.prefill_s(1, 0) >= LLAMA_3_8B.weights_bytes / H200.memory_bytes_per_s


@given(first=st.integers(500, 4000), second=st.integers(500, 4000))
def test_prefill_in_two_chunks_does_the_attention_of_one(first: int, second: int) -> None:
    # Compute-bound chunks add up, but for one more lm_head and nothing else.
    whole = ROOFLINE.prefill_s(first + second, 0)
    chunks = ROOFLINE.prefill_s(first, 0) + ROOFLINE.prefill_s(second, first)
    one_head_s = 2 * LLAMA_3_8B.head_params / H200.flops_per_s
    assert chunks == pytest.approx(whole + one_head_s, rel=1e-9)


@given(tokens=st.integers(0, 10_000), more=st.integers(0, 10_000), context=st.integers(0, 10_000))
def test_more_work_never_costs_less(tokens: int, more: int, context: int) -> None:
    assert ROOFLINE.prefill_s(tokens + more, context) >= ROOFLINE.prefill_s(tokens, context)
    assert ROOFLINE.prefill_s(tokens, context + more) >= ROOFLINE.prefill_s(tokens, context)
    assert ROOFLINE.decode_step_s(tokens + more, context) >= ROOFLINE.decode_step_s(tokens, context)
    assert ROOFLINE.transfer_s(tokens + more) >= ROOFLINE.transfer_s(tokens)


def test_tensor_parallel_ranks_share_the_work() -> None:
    halved = replace(ROOFLINE, tp=2)
    assert halved.prefill_s(1000, 0) == pytest.approx(ROOFLINE.prefill_s(1000, 0) / 2)


def test_half_the_utilisation_takes_twice_as_long() -> None:
    slow = replace(ROOFLINE, device=replace(H200, mfu=0.5, mbu=0.5))
    assert slow.prefill_s(1000, 0) == pytest.approx(2 * ROOFLINE.prefill_s(1000, 0))
    assert slow.decode_step_s(4, 1000) == pytest.approx(2 * ROOFLINE.decode_step_s(4, 1000))


def test_stretched_steps_take_longer_and_transfers_do_not() -> None:
    slow = StretchedCostModel(ROOFLINE, 1.5)
    work = [PrefillWork(300, 100)]
    for found, base in (
        (slow.prefill_s(300, 100), ROOFLINE.prefill_s(300, 100)),
        (slow.decode_step_s(8, 4000), ROOFLINE.decode_step_s(8, 4000)),
        (slow.step_s(work, 8, 4000), ROOFLINE.step_s(work, 8, 4000)),
    ):
        assert found == 1.5 * base
    assert slow.transfer_s(1 << 20) == ROOFLINE.transfer_s(1 << 20)


def test_no_work_costs_nothing() -> None:
    assert ROOFLINE.prefill_s(0, 100) == ROOFLINE.decode_step_s(0, 0) == ROOFLINE.transfer_s(0) == 0.0


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: replace(LLAMA_3_8B, layers=0), "layers"),
        (lambda: replace(LLAMA_3_8B, kv_heads=5), "heads"),
        (lambda: replace(H200, mfu=1.5), "mfu"),
        (lambda: replace(H200, memory_bytes_per_s=float("nan")), "memory_bytes_per_s"),
        (lambda: replace(NVLINK, latency_s=-1.0), "latency_s"),
        (lambda: replace(ROOFLINE, tp=0), "tp"),
        (lambda: ROOFLINE.prefill_s(-1, 0), "tokens"),
        (lambda: ROOFLINE.transfer_s(-1), "num_bytes"),
    ],
)
def test_what_cannot_be_is_refused_and_named(build: object, field: str) -> None:
    assert callable(build)
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field


def test_the_planner_imports_neither_torch_nor_numpy() -> None:
    code = "import planner.cost, sys; sys.exit(bool({'torch', 'numpy', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
