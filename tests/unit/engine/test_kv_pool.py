"""The pool's memory: shared, of fixed size, and refused in good time when there is not enough."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tandem.config.engine import EngineSpec
from tandem.engine.kv_pool import KvPool, block_layout, pool_layout
from tandem.errors import InsufficientMemory
from tandem.kvcache.layout import KvPoolLayout
from tandem.machine_memory import available_bytes

LAYOUT = KvPoolLayout(num_blocks=4, layers=2, kv_heads=2, block_tokens=16, head_dim=8, dtype="float32")
BLOCK = replace(LAYOUT, num_blocks=1)


def test_another_mapping_sees_what_the_tensor_holds_where_the_layout_says() -> None:
    pool = KvPool(LAYOUT, torch.device("cpu"))
    assert pool.tensor.shape == LAYOUT.shape
    assert pool.fd is not None
    pool.tensor[3, 1] = 7.0
    with mmap.mmap(pool.fd, LAYOUT.pool_bytes, prot=mmap.PROT_READ) as other:
        start = 3 * LAYOUT.block_bytes + LAYOUT.layer_bytes
        assert (np.frombuffer(other[start : start + LAYOUT.layer_bytes], dtype=np.float32) == 7.0).all()
        assert not any(other[:start])


@pytest.mark.parametrize("size_bytes", [0, LAYOUT.pool_bytes * 2])
def test_nobody_can_resize_the_memory_under_another(size_bytes: int) -> None:
    pool = KvPool(LAYOUT, torch.device("cpu"))
    assert pool.fd is not None
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, size_bytes)


def test_the_pool_has_as_many_blocks_as_asked_for_or_as_its_memory_holds() -> None:
    block_bytes = LAYOUT.block_bytes

    def blocks(**spec: int) -> int:
        return pool_layout(EngineSpec.model_validate(spec), BLOCK, available=1 << 30, automatic=1 << 20).num_blocks

    assert blocks(kv_memory_bytes=2 << 20) == (2 << 20) // block_bytes
    assert blocks(kv_blocks=9, kv_memory_bytes=2 << 20) == 9
    assert blocks() == (1 << 20) // block_bytes


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(InsufficientMemory, match="kv_blocks") as raised:
        pool_layout(EngineSpec(kv_blocks=2**40), BLOCK, available=4711, automatic=0)
    assert f"got {2**40 * LAYOUT.block_bytes} bytes where 4711 are" in raised.value.message
    assert raised.value.field == "engine.kv_blocks"
    with pytest.raises(InsufficientMemory, match="kv_memory_bytes") as raised:
        pool_layout(EngineSpec(kv_memory_bytes=1 << 20), BLOCK, available=4711, automatic=0)
    assert raised.value.field == "engine.kv_memory_bytes"
    large = block_layout(EngineSpec(), layers=80, kv_heads=8, head_dim=128)
    with pytest.raises(InsufficientMemory, match="two KV blocks"):
        pool_layout(EngineSpec(kv_memory_bytes=1 << 20), large, available=1 << 40, automatic=0)


def write_group(folder: Path, limit_file: str, usage_file: str, limit: str, usage: int, prefix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(limit)
    (folder / usage_file).write_text(str(usage))
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file 60\n{prefix}active_file 40\n")


def test_the_tightest_control_group_above_this_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/app\n")
    write_group(tmp_path / "pod", "memory.max", "memory.current", "5000", 1000)
    write_group(tmp_path / "pod/app", "memory.max", "memory.current", "max", 1000)
    assert available_bytes(tmp_path, own) == 4100


def test_the_older_control_groups_count_too_also_seen_from_inside_a_container(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("3:cpu:/x\n4:memory:/docker/unseen\n")
    folder = tmp_path / "memory"
    write_group(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "1500", 1000, "total_")
    assert available_bytes(tmp_path, own) == 600
    (folder / "memory.limit_in_bytes").write_text("800")
    assert available_bytes(tmp_path, own) == 0


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path / "none") <= psutil.virtual_memory().total
