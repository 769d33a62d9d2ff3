"""The work that workers count is the work that the planner's roofline expects of the same step."""

from pathlib import Path

import pytest

from planner.cost import RooflineCostModel
from planner.shapes import DeviceShape, LinkShape, ModelShape
from tandem.checkpoint.model_config import ModelConfig
from tandem.engine.step_work import StepWork, WorkShape
from tandem.testing.models import write_tiny_llama


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> WorkShape:
    return WorkShape.of(ModelConfig.load(write_tiny_llama(tmp_path_factory.mktemp("m"))), weight_bytes=4, kv_bytes=4)


def roofline(shape: WorkShape, *, flops: float, memory: float) -> RooflineCostModel:
    model = ModelShape(
        layers=2, heads=4, kv_heads=2, head_dim=16, block_params=shape.block_params, head_params=shape.head_params,
        weight_bytes=4, kv_bytes=4,
    )  # fmt: skip
    return RooflineCostModel(model, DeviceShape(flops, memory), LinkShape(1.0))


@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (100, 0), (512, 1000)])
def test_of_a_prefill(shape: WorkShape, tokens: int, context: int) -> None:
    work = StepWork().with_chunk(context, tokens, decodes=False, samples=True)
    by_compute, by_memory = roofline(shape, flops=1.0, memory=1e30), roofline(shape, flops=1e30, memory=1.0)
    assert shape.flops(work) == pytest.approx(by_compute.prefill_s(tokens, context), rel=0.01)
    assert shape.memory_bytes(work) == pytest.approx(by_memory.prefill_s(tokens, context))


def test_of_a_decode_step(shape: WorkShape) -> None:
    work = StepWork()
    for context in (10, 500, 90):
        work = work.with_chunk(context - 1, 1, decodes=True, samples=True)
    by_compute, by_memory = roofline(shape, flops=1.0, memory=1e30), roofline(shape, flops=1e30, memory=1.0)
    assert shape.flops(work) == pytest.approx(by_compute.decode_step_s(3, 600))
    assert shape.memory_bytes(work) == pytest.approx(by_memory.decode_step_s(3, 600))


def test_parameters_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    config = ModelConfig.load(write_tiny_llama(tmp_path, vocab=320, hidden=64, layers=2, intermediate=128))
    shape = WorkShape.of(config, weight_bytes=2, kv_bytes=1)
    assert shape.head_params == 64 * 320
    assert shape.block_params == 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert shape.weights_bytes == 2 * (shape.block_params + shape.head_params)
    assert shape.kv_token_bytes == 2 * 2 * 32  # K and V, layers


def test_of_experts_only_the_chosen_ones_count() -> None:
    sparse = WorkShape(
        block_params=100, head_params=10, attention_width=4, weights_bytes=1000, kv_token_bytes=0, expert_bytes=50,
        experts=8, experts_per_token=2,
    )  # fmt: skip
    moved = [
        sparse.memory_bytes(StepWork().with_chunk(0, tokens, decodes=False, samples=True)) for tokens in (1, 2, 100)
    ]
    assert moved == pytest.approx([1100, 1000 + 50 * 3.5, 1400])  # a token of two chooses one of the other's by chance
