"""Which kernels a GPU uses for which steps, and whether decode steps are recorded, with stand-ins for what it has."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.attention import paged_kernels
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath, choose_paged_path
from tandem.engine.attention.varlen_attention import PagedKernel, StepRows
from tandem.engine.factory import Rank
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Decoder
from tandem.model.experts import SeparateExperts, SparseMlp, StackedExperts
from tandem.model.matrices import Dense
from tandem.request import SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tests.conftest import write_family

GPU = torch.device("cuda")
LAYOUT = KvPoolLayout(num_blocks=8, layers=1, kv_heads=2, block_tokens=16, head_dim=16, dtype="bfloat16")
WRONG = "its results differ from the reference by 1 of their norm"


class Planned:
    """As FlashInfer: plans each step, then computes it."""

    def plan(self, rows: StepRows) -> PagedKernel:
        return plain_attention


@dataclass
class Gpu:
    """What it finds wrong with each kernel; None: it is right."""

    triton: str | None = None
    flashinfer: str | None = None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU with Triton and FlashInfer."""
    found = Gpu()
    library, vendor = ModuleType("flashinfer"), ModuleType("vendor")
    library.__spec__ = ModuleSpec("flashinfer", None)
    vendor.__dict__["FlashInferAttention"] = lambda *terms: Planned()
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setitem(sys.modules, "tandem.engine.attention.flashinfer_attention", vendor)
    monkeypatch.setattr(paged_kernels, "available_kernels", lambda *of: iter([("Triton", plain_attention)]))
    monkeypatch.setattr(paged_kernels, "kernel_error", lambda kernel, *of: getattr(found, _name_of(kernel)))
    monkeypatch.setattr(paged_kernels, "_triton", lambda device: None)
    monkeypatch.setattr(paged_kernels, "CudaGraphRecorder", lambda device: EagerRecorder())
    return found


def _name_of(kernel: object) -> str:
    return "flashinfer" if isinstance(kernel, Planned) else "triton"


def model_of(rank: Rank) -> Decoder:
    return rank.runner._model


def stack(model: Decoder) -> None:
    """What a GPU does whose grouped product is right."""
    for layer in model.layers:
        if isinstance(layer.mlp, SparseMlp):
            experts = layer.mlp.experts
            assert isinstance(experts, SeparateExperts)
            gate_up, down = (
                torch.stack([each.weight for each in matrices if isinstance(each, Dense)])
                for matrices in (experts.gate_up, experts.down)
            )
            stacked = StackedExperts(gate_up, down, experts.activation, experts.ops)
            object.__setattr__(layer, "mlp", replace(layer.mlp, experts=stacked))


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("dense")
    return model_of(single_rank(write_family(folder, "qwen3"), folder / "r"))


def test_decode_steps_are_recorded_with_the_kernel_and_prompts_planned(gpu: Gpu, dense: Decoder) -> None:
    path = choose_paged_path(dense, LAYOUT, torch.bfloat16, GPU)
    assert path is not None
    assert path.kernel is plain_attention
    assert isinstance(path.planned, Planned)
    assert isinstance(path.recorder, EagerRecorder)


def test_a_gpu_without_flashinfer_uses_the_kernel_for_all_steps(gpu: Gpu, dense: Decoder) -> None:
    gpu.flashinfer = WRONG
    path = choose_paged_path(dense, LAYOUT, torch.bfloat16, GPU)
    assert path is not None
    assert (path.kernel, path.planned) == (plain_attention, None)
    assert path.recorder is not None


def test_flashinfer_alone_computes_all_steps_and_none_is_recorded(
    gpu: Gpu, dense: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.triton = WRONG
    path = choose_paged_path(dense, LAYOUT, torch.bfloat16, GPU)
    assert path is not None
    assert (path.kernel, path.recorder) == (None, None)
    assert isinstance(path.planned, Planned)
    assert f"cannot use a paged kernel: Triton: {WRONG}" in caplog.text
    assert "decode steps are not recorded: FlashInfer plans each step on the host" in caplog.text
    assert "gathers" not in caplog.text


def test_a_gpu_on_which_no_kernel_is_right_gathers_blocks(
    gpu: Gpu, dense: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.triton = gpu.flashinfer = WRONG
    assert choose_paged_path(dense, LAYOUT, torch.bfloat16, GPU) is None
    assert "attention gathers KV blocks and decode steps are not recorded" in caplog.text


def test_flashinfer_is_not_asked_about_a_model_that_it_cannot_compute(gpu: Gpu, dense: Decoder) -> None:
    assert choose_paged_path(dense, replace(LAYOUT, dtype="float32"), torch.float32, GPU) is None


def test_steps_with_experts_are_recorded_if_no_shape_depends_on_the_choice(
    gpu: Gpu, experts_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(single_rank(experts_dir, tmp_path / "r"))
    separate = choose_paged_path(model, LAYOUT, torch.bfloat16, GPU)
    assert separate is not None
    assert separate.recorder is None
    assert "decode steps are not recorded: the model's experts are multiplied one by one" in caplog.text
    stack(model)
    stacked = choose_paged_path(model, LAYOUT, torch.bfloat16, GPU)
    assert stacked is not None
    assert stacked.recorder is not None


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations that ran, with the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            self.seen.append((func.overloadpacket.__name__, tuple(each.shape) if isinstance(each, Tensor) else ()))
        return result


class ShapesRecorder:
    """Replays as `EagerRecorder`, and demands the recording's operations and shapes, which is all a graph can do."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # what is made at first use, such as tables of angles
        with Shapes() as recorded:
            work()

        def replay() -> None:
            with Shapes() as again:
                work()
            assert again.seen == recorded.seen
            self.replays += 1

        return replay


def tokens_of(rank: Rank) -> dict[str, list[int]]:
    driver, choose = EngineDriver(rank.engine), random.Random(3)
    for number in range(7):
        if number > 3:
            driver.take(driver.engine.step())
        sampling = SamplingParams(temperature=0.0, max_tokens=choose.randrange(3, 15))
        driver.add(f"r{number}", random_prompt(choose.randrange(2, 60), 300, number), sampling)
    driver.run()
    return driver.tokens


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "separate"])
def test_recorded_steps_of_stacked_experts_give_the_tokens_of_launched_ones(
    experts_dir: Path, tmp_path: Path, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are multiplied one by one show that the recorder would see a choice."""
    settings: dict[str, Any] = {"kernels": "torch", "max_running_requests": 5, "max_model_tokens": 128}
    expected = tokens_of(single_rank(experts_dir, tmp_path / "l", paged=PagedPath(plain_attention, None), **settings))
    recorder = ShapesRecorder()
    if stacked:
        load = Decoder.__init__

        def load_stacked(self: Decoder, *parts: Any, **more: Any) -> None:
            load(self, *parts, **more)
            stack(self)

        monkeypatch.setattr(Decoder, "__init__", load_stacked)
    rank = single_rank(experts_dir, tmp_path / "r", paged=PagedPath(plain_attention, recorder), **settings)
    if stacked:
        assert tokens_of(rank) == expected
        assert recorder.replays > 10
    else:
        with pytest.raises(AssertionError):
            tokens_of(rank)
