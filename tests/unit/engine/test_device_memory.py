"""A GPU's memory is divided after weights and activations are known. A fake device stands for the GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tandem.config.engine import EngineSpec
from tandem.engine.allocation_failures import is_out_of_memory
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.device_memory import UNTRACKED_BYTES, kv_budget, largest_steps, measured_budget
from tandem.engine.factory import Rank, build_rank
from tandem.engine.tp_group import TpGroup
from tandem.errors import InsufficientMemory
from tandem.request import SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, NoExport
from tandem.testing.models import random_prompt
from tests.conftest import Reference

GIB, MIB = 1 << 30, 1 << 20
RESERVE = UNTRACKED_BYTES + 8 * GIB // 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@dataclass
class FakeMemory:
    """A device of 8 GiB with 2 GiB of weights, on which every work has the same peak."""

    peak: int = GIB
    total_bytes: int = 8 * GIB
    free: int = 6 * GIB
    limits: list[float] = field(default_factory=list)
    works: int = 0

    def free_bytes(self) -> int:
        return self.free

    def allocated_bytes(self) -> int:
        return 2 * GIB

    def limit(self, share: float) -> None:
        self.limits.append(share)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        self.works += 1
        return self.peak


def test_the_budget_is_what_the_share_leaves() -> None:
    assert kv_budget(100, 1.0, 30, 10, 5) == 55
    assert kv_budget(100, 0.5, 30, 10, 5) == 5
    assert kv_budget(100, 0.4, 30, 10, 5) == -5


def test_a_cpu_has_no_share_to_set() -> None:
    with pytest.raises(ValueError, match=r"device_share: expected 1 with device cpu"):
        EngineSpec(device_share=0.5)


def test_recorded_steps_keep_their_activations() -> None:
    launched = measured_budget(FakeMemory(), EngineSpec(), lambda: None, records=False)
    assert launched == 8 * GIB - 2 * GIB - GIB - RESERVE
    assert measured_budget(FakeMemory(), EngineSpec(), lambda: None, records=True) == launched - GIB


def test_what_others_use_beyond_their_shares_is_not_counted_on() -> None:
    assert measured_budget(FakeMemory(free=3 * GIB), EngineSpec(), lambda: None, records=False) == 2 * GIB - RESERVE


@pytest.mark.parametrize("memory", [FakeMemory(), FakeMemory(free=GIB)])
def test_a_share_that_leaves_nothing_is_refused_with_all_parts(memory: FakeMemory) -> None:
    share = 1.0 if memory.free == GIB else 0.4
    with pytest.raises(InsufficientMemory, match=r"weights need 2147483648 .* raise engine\.device_share") as raised:
        measured_budget(memory, EngineSpec(device="cuda", device_share=share), lambda: None, records=False)
    assert raised.value.field == "engine.device_share"


def test_a_step_that_does_not_fit_beside_the_weights_names_its_size() -> None:
    def exhausted() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InsufficientMemory, match=r"weights need 2147483648 .* a step of 512 tokens") as raised:
        measured_budget(FakeMemory(), EngineSpec(), exhausted, records=False)
    assert raised.value.field == "engine.max_step_tokens"


def test_errors_other_than_of_memory_are_not_renamed() -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        measured_budget(FakeMemory(), EngineSpec(), broken, records=False)


def test_the_largest_steps_have_the_longest_chunk_and_the_most_samples() -> None:
    spec = EngineSpec(max_step_tokens=64, max_running_requests=5)
    longest, widest = (step.sequences for step in largest_steps(spec, max_model_tokens=1000))
    assert [(each.start, len(each.token_ids), len(each.blocks)) for each in longest] == [(936, 64, 63)]
    assert [(each.start, len(each.token_ids)) for each in widest] == [(0, 12)] * 5
    draws = [draw for each in (*longest, *widest) for draw in each.draws]
    assert len(draws) == 6
    assert all(each and each.top_p < 1 and each.min_p and each.penalties and each.logprobs == 20 for each in draws)
    short, many = (step.sequences for step in largest_steps(spec, max_model_tokens=16))
    assert [(each.start, len(each.token_ids)) for each in short] == [(0, 16)]
    assert len(many) == 5


def build(model_dir: Path, folder: Path, memory: FakeMemory, **spec: object) -> Rank:
    return build_rank(
        model_dir, EngineSpec.model_validate({"kernels": "torch", "max_running_requests": 4} | spec), rank=0, size=1,
        rendezvous_file=folder / "r", exporter=NoExport(), paged=PagedPath(plain_attention, EagerRecorder()),
        memory=memory,
    )  # fmt: skip


def test_a_rank_takes_what_is_left_and_answers(
    model_dir: Path, tmp_path: Path, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    memory = FakeMemory(free=RESERVE + 2 * GIB + 64 * MIB)
    rank = build(model_dir, tmp_path, memory)
    assert rank.layout.num_blocks == 64 * MIB // rank.layout.block_bytes - 1  # and the spare block
    assert memory.limits == [1.0]
    assert memory.works == 1
    assert "weights need 2147483648 bytes, activations 1073741824" in caplog.text
    driver = EngineDriver(rank.engine)
    prompt = random_prompt(40, 300, 0)
    driver.add("a", prompt, GREEDY)
    driver.run()
    assert driver.tokens["a"] == reference.answer(prompt, GREEDY)


def test_ranks_agree_on_the_smallest_budget(tmp_path: Path) -> None:
    def least(rank: int) -> int:
        return TpGroup(tmp_path / "r", rank, 2, torch.device("cpu")).least(100 + rank)

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(least, range(2))) == [100, 100]


def test_a_configured_pool_larger_than_what_is_left_is_refused_by_its_field(model_dir: Path, tmp_path: Path) -> None:
    memory = FakeMemory(free=2 * GIB + RESERVE + MIB)
    with pytest.raises(InsufficientMemory, match=r"got 67108864 bytes where \d+ are") as raised:
        build(model_dir, tmp_path, memory, kv_memory_bytes=64 * MIB)
    assert raised.value.field == "engine.kv_memory_bytes"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_failed_allocations_are_told_from_other_errors(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_torchs_own_error_on_a_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value)
