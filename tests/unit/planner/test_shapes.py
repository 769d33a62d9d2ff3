"""Experts, latents and windows: what steps of such models read and compute, against published figures and counting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import PrefillWork, RooflineCostModel
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import MXFP4, ElementSizes, find_model
from planner.search.analytic import seen_tokens
from planner.shapes import DeviceShape, ExpertShape, LinkShape, ModelShape, WindowShape
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError

DENSE = ModelShape(layers=6, heads=8, kv_heads=2, head_dim=16, block_params=10_000, head_params=500)
EXPERTS = ExpertShape(layers=5, count=8, per_token=2, params=300)
WINDOW = WindowShape(layers=4, tokens=100)
BY_COMPUTE, BY_MEMORY = DeviceShape(1.0, 1e30), DeviceShape(1e30, 1.0)


def cost(model: ModelShape, device: DeviceShape) -> RooflineCostModel:
    return RooflineCostModel(model, device, LinkShape(1.0))


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141.0, 39.0),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("minimax-m2", 230.0, 10.0),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("deepseek-v3", 671.0, 37.0),
        ("kimi-k2", 1040.0, 32.0),
    ],
)
def test_parameters_are_those_that_are_published(name: str, billions: float, active: float) -> None:
    model = find_model(name)
    experts = model.shape.experts
    assert experts is not None
    assert model.resident_params / 1e9 == pytest.approx(billions, rel=0.02)
    used = experts.layers * experts.per_token * experts.params + model.shape.block_params
    embeddings = model.resident_params - experts.all_params - model.shape.block_params  # not all count them
    assert 0.97 * used <= active * 1e9 <= 1.03 * (used + embeddings)


def test_a_latent_keeps_70_kb_for_each_token_on_each_rank() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 elements (its report: 70 KB, where Llama-3.1-405B needs 516)."""
    model = find_model("deepseek-v3")
    assert model.shape.kv_token_bytes == 61 * 576 * 2 == 70_272
    hardware = Hardware(model, find_device("h200"))
    assert hardware.kv_tokens(8) == int(hardware.kv_rank_bytes(8) / 70_272)


def test_weights_are_planned_as_they_are_published() -> None:
    in_eight_bits = 671e9 + 2 * 129_280 * 7168  # embeddings and head in 16
    assert find_model("deepseek-v3").resident_bytes == pytest.approx(in_eight_bits, rel=0.001)
    assert find_model("deepseek-v3", ElementSizes(2.0)).resident_bytes == pytest.approx(1342e9, rel=0.001)
    assert find_model("gpt-oss-120b").resident_bytes == pytest.approx(65e9, rel=0.02)  # its files
    given = find_model("gpt-oss-120b", ElementSizes(1.0, experts=2.0)).shape
    assert given.experts is not None
    assert (given.weight_bytes, given.experts.weight_bytes) == (1.0, 2.0)
    assert find_model("llama-3-8b", ElementSizes(activations=4.0)).shape.weight_bytes == 4.0


@pytest.mark.parametrize(
    ("name", "elements", "gigabytes"),
    [
        ("llama-3-8b", ElementSizes(2.0), 16.06),
        ("llama-3-8b", ElementSizes(1.0), 6.98 + 2 * 1.05),
        ("llama-3-8b", ElementSizes(1.0, activations=4.0), 6.98 + 2.10 + 0.53),
        ("smollm2-135m", ElementSizes(4.0, activations=4.0), 0.538),
        ("smollm2-135m", ElementSizes(1.0), 0.1062 + 0.0566),
        ("smollm2-135m", ElementSizes(1.0, activations=4.0), 0.1062 + 0.1132 + 0.0283),
        ("qwen3-30b-a3b", ElementSizes(2.0, experts=1.0), 28.99 + 2 * 1.528),
    ],
)
def test_vocabularies_stay_wide_beside_narrow_weights(name: str, elements: ElementSizes, gigabytes: float) -> None:
    """As the engine keeps them: a tied head is no second matrix but on a CPU, where it is in eight bits."""
    assert find_model(name, elements).resident_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_experts_in_four_bits_are_multiplied_at_their_peak() -> None:
    device = find_device("b200")
    by_size = {size: device.shape(2.0, size).expert_flops_per_s for size in (2.0, 1.0, MXFP4, 0.625)}
    assert by_size == {2.0: None, 1.0: 4500e12, MXFP4: 9000e12, 0.625: None}


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    sparse = replace(DENSE, experts=EXPERTS)
    of_all = 5 * 8 * 300 * 2

    def read(batch: int) -> float:
        return cost(sparse, BY_MEMORY).decode_step_s(batch, 0) - cost(DENSE, BY_MEMORY).decode_step_s(batch, 0)

    assert read(1) == pytest.approx(of_all * 2 / 8)
    assert read(2) == pytest.approx(of_all * (1 - (6 / 8) ** 2))
    assert read(100) == pytest.approx(of_all)
    rng = np.random.default_rng(0)
    drawn = [len(np.unique([rng.permutation(8)[:2] for _ in range(3)])) / 8 for _ in range(4000)]
    assert read(3) / of_all == pytest.approx(np.mean(drawn), rel=0.02)


def test_each_token_is_multiplied_with_its_own_experts() -> None:
    sparse = cost(replace(DENSE, experts=EXPERTS), BY_COMPUTE)
    more = sparse.decode_step_s(7, 0) - cost(DENSE, BY_COMPUTE).decode_step_s(7, 0)
    assert more == pytest.approx(2 * 7 * 5 * 2 * 300)
    slow = replace(sparse, device=replace(BY_COMPUTE, expert_efficiency=0.5, expert_overhead_s=3.0))
    assert slow.decode_step_s(7, 0) - sparse.decode_step_s(7, 0) == pytest.approx(more + 5 * 3.0)


@given(first=st.integers(1, 300), second=st.integers(1, 300), context=st.integers(0, 300))
def test_windows_bound_what_each_token_of_a_prompt_sees(first: int, second: int, context: int) -> None:
    model = replace(DENSE, window=WINDOW)
    seen = sum(2 * (each + 0.5) + 4 * min(each + 0.5, 100) for each in range(context, context + first))
    flops = model.prefill_flops(first, context)
    assert flops == pytest.approx(4 * 8 * 16 * seen, rel=1e-3)
    whole = model.prefill_flops(first + second, context)
    assert flops + model.prefill_flops(second, context + first) == pytest.approx(whole)


def test_windows_bound_what_a_decode_step_reads() -> None:
    model = replace(DENSE, window=WINDOW)
    layer_token = 2 * 2 * 16 * 2

    def read(batch: int, context: int) -> float:
        moved = cost(model, BY_MEMORY).decode_step_s(batch, context) - model.weights_bytes
        return moved / layer_token

    assert read(3, 3 * 50) == pytest.approx(6 * 150)
    assert read(3, 3 * 500) == pytest.approx(2 * 1500 + 4 * 300)


@given(layers=st.integers(1, 6), context=st.floats(0, 1000))
def test_a_context_is_found_by_what_it_sees(layers: int, context: float) -> None:
    model = replace(DENSE, window=WindowShape(layers, 100))
    expected = min(context, 100) if layers == 6 else context
    assert model.context_of(model.seen_tokens(context, 1)) == pytest.approx(expected)


def test_a_bound_takes_what_each_token_sees_not_what_the_mean_context_would() -> None:
    """Contexts on both sides of the window: together they see less than as many of the mean length."""
    model = replace(DENSE, window=WindowShape(6, 100))
    trace = TrafficTrace("t", np.array([0.0, 1.0]), np.array([40, 1000]), np.array([40, 40]))
    assert seen_tokens(trace, model).tolist() == pytest.approx([6 * 60, 6 * 100])
    half = TrafficTrace("t", np.array([0.0]), np.array([80]), np.array([40]))
    by_counting = 6 * np.mean(np.minimum(np.arange(80, 120) + 0.5, 100))
    assert seen_tokens(half, model)[0] == pytest.approx(by_counting, rel=1e-3)


def test_ranks_beyond_the_kv_heads_read_copies() -> None:
    def kv_s(tp: int) -> float:
        wide = replace(cost(DENSE, BY_MEMORY), tp=tp)
        return wide.decode_step_s(1, 1000) - wide.decode_step_s(1, 0)

    assert kv_s(2) == pytest.approx(kv_s(1) / 2)
    assert kv_s(8) == pytest.approx(kv_s(2)), "of two KV heads, four ranks hold each"


def test_a_latent_costs_more_arithmetic_in_decode_than_in_prefill() -> None:
    shape = find_model("deepseek-v3").shape
    assert shape.prefill_flops(1, 1000) == pytest.approx(2 * 61 * 128 * (192 + 128) * 1000.5)
    assert shape.decode_flops(shape.seen_tokens(1000, 1)) == pytest.approx(2 * 61 * 128 * (512 + 576) * 1000)


@given(
    tokens=st.integers(0, 3000), more=st.integers(0, 3000), context=st.integers(0, 3000),
    name=st.sampled_from(["mixtral-8x7b", "gpt-oss-20b", "deepseek-v3"]),
)  # fmt: skip
def test_more_work_never_costs_less(tokens: int, more: int, context: int, name: str) -> None:
    model = cost(find_model(name).shape, DeviceShape(989e12, 4.8e12))
    assert model.prefill_s(tokens + more, context) >= model.prefill_s(tokens, context)
    assert model.prefill_s(tokens, context + more) >= model.prefill_s(tokens, context)
    assert model.step_s([PrefillWork(tokens, context)], 8, 4000) >= model.decode_step_s(8, 4000)
    assert model.decode_step_s(tokens + more, context) >= model.decode_step_s(tokens, context)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: replace(EXPERTS, per_token=9), "per_token"),
        (lambda: replace(EXPERTS, count=0), "count"),
        (lambda: replace(DENSE, window=WindowShape(7, 100)), "window"),
        (lambda: WindowShape(1, 0), "tokens"),
        (lambda: DeviceShape(1.0, 1.0, expert_efficiency=0.0), "expert_efficiency"),
        (lambda: DeviceShape(1.0, 1.0, expert_overhead_s=-1.0), "expert_overhead_s"),
    ],
)
def test_impossible_shapes_are_refused_by_name(build: object, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: expected") as error:
        build()  # type: ignore[operator]
    assert error.value.field == field
