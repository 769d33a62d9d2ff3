"""A block that does not exist ends the step before a kernel uses it as an address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.block_tables import check_blocks
from tandem.engine.factory import Rank
from tandem.engine.step import SequenceStep, StepInput
from tandem.errors import InternalError
from tandem.kvcache.host_tier import BlockCopies
from tandem.testing.engine import EagerRecorder, single_rank


@pytest.mark.parametrize("blocks", [[], [0], [[0, 3], [2, 1]]])
def test_blocks_of_the_pool_pass(blocks: list[int]) -> None:
    check_blocks(np.array(blocks, dtype=np.int64), 4)


@pytest.mark.parametrize("blocks", [[4], [0, -1], [2**40]])
def test_others_are_named(blocks: list[int]) -> None:
    with pytest.raises(InternalError, match="expected blocks from 0 to 3"):
        check_blocks(np.array(blocks, dtype=np.int64), 4)


PATHS: dict[str, Callable[[Path, Path], Rank]] = {
    "native": lambda model, folder: single_rank(model, folder, kernels="native", kv_blocks=16),
    "gathered": lambda model, folder: single_rank(model, folder, kernels="torch", kv_blocks=16),
    "paged": lambda model, folder: single_rank(
        model, folder, kernels="torch", kv_blocks=16, paged=PagedPath(plain_attention, None)
    ),
    "recorded": lambda model, folder: single_rank(
        model, folder, kernels="torch", kv_blocks=16, max_running_requests=4, max_model_tokens=64,
        paged=PagedPath(plain_attention, EagerRecorder()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("block", [17, 2**20, -1])
def test_each_path_checks_its_tables(path: str, block: int, model_dir: Path, tmp_path: Path) -> None:
    rank = PATHS[path](model_dir, tmp_path / "r")
    before = rank.pool.tensor.clone()
    bad = SequenceStep([1], 16, [3, block], samples=1, greedy=True)
    good = SequenceStep([1], 3, [2], samples=1, greedy=True)
    with pytest.raises(InternalError, match=f"to 1[56], got .*{block}"):
        rank.runner.launch(StepInput([good, bad], []))
    assert rank.pool.tensor.equal(before)
    assert rank.runner.launch(StepInput([good], [])) is not None


@pytest.mark.parametrize("copies", [BlockCopies([16], [0], [], []), BlockCopies([], [], [-1], [3])])
def test_the_host_tier_checks_its_copies(copies: BlockCopies, model_dir: Path, tmp_path: Path) -> None:
    rank = single_rank(model_dir, tmp_path / "r", kv_blocks=16, host_kv_memory_bytes=1 << 20)
    with pytest.raises(InternalError, match="expected blocks from 0"):
        rank.runner.launch(StepInput([], [], copies=copies))
