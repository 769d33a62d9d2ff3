"""A pool on a torch device does what a pool in host memory does, and its digest finds what changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.causes import HandoffFault
from kvtransfer.control import HOST_DEVICE, IPC_HANDLE_BYTES, DeviceMemory
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import MAX_RUN_COPIES, DevicePool
from kvtransfer.pool.pool import Bytes, PoolMap, PoolSpan, make_staging
from kvtransfer.pool.pools import open_pool
from kvtransfer.pool.staging import Staging
from kvtransfer.testing.pool import make_pool
from tandem.kvcache.layout import KvPoolLayout

LAYOUT = KvPoolLayout(num_blocks=24, layers=3, kv_heads=4, block_tokens=4, head_dim=8, dtype="bfloat16")
CPU = torch.device("cpu")
KEY = 7
STAGING = Staging(make_staging, 0)
KEYS = DigestKeys(KEY, LAYOUT.head_bytes // 4, CPU)
SPREAD = tuple(range(23, 3, -2))  # each block a run of its own
assert len(SPREAD) > MAX_RUN_COPIES


def pool_of(seed: int, layout: KvPoolLayout = LAYOUT) -> tuple[DevicePool, PoolMap]:
    """One pool, seen both ways."""
    memory = bytearray(np.random.default_rng(seed).integers(0, 256, layout.pool_bytes, np.uint8).tobytes())
    return DevicePool(layout, torch.frombuffer(memory, dtype=torch.uint8)), PoolMap(layout, memory)


@st.composite
def spans(draw: st.DrawFn) -> PoolSpan:
    layer, head = draw(st.integers(0, LAYOUT.layers - 1)), draw(st.integers(0, LAYOUT.kv_heads - 1))
    ids = draw(st.lists(st.integers(0, LAYOUT.num_blocks - 1), min_size=1, unique=True))
    if draw(st.booleans()):
        ids.sort()
    return PoolSpan(
        tuple(ids),
        draw(st.integers(1, LAYOUT.block_tokens)),
        layer,
        draw(st.integers(1, LAYOUT.layers - layer)),
        head,
        draw(st.integers(1, LAYOUT.kv_heads - head)),
    )


def elsewhere(span: PoolSpan, seed: int) -> PoolSpan:
    """A span of the same shape."""
    ids = np.random.default_rng(seed).permutation(LAYOUT.num_blocks)[: len(span.block_ids)]
    return replace(span, block_ids=tuple(ids.tolist()), head_start=LAYOUT.kv_heads - span.head_count)


def by_definition(pool: PoolMap, span: PoolSpan) -> int:
    """Row by row, in Python's own integers."""
    streams = [np.random.Philox(key=np.array([KEY, number], np.uint64)) for number in range(2)]
    word_keys, row_keys = ([int(k) | 1 for k in stream.random_raw(4096)] for stream in streams)
    rows = []
    for row in _rows(pool, span):
        words = np.frombuffer(row.tobytes(), np.int32).tolist()
        rows.append(sum(word * key for word, key in zip(words, word_keys, strict=False)) % 2**64)
    entries = np.array(rows, np.uint64).view(np.int32).tolist()
    return int(sum(entry * key for entry, key in zip(entries, row_keys, strict=False)) % 2**64)


def _rows(pool: PoolMap, span: PoolSpan) -> Iterator[Bytes]:
    for index, block in enumerate(span.block_ids):
        is_last = index == len(span.block_ids) - 1
        valid = span.last_block_tokens if is_last else LAYOUT.block_tokens
        for layer in range(span.layer_start, span.layer_start + span.layer_count):
            for entry in range(2):
                for head in range(span.head_start, span.head_start + span.head_count):
                    yield pool.blocks[block, layer, entry, head, :valid]


@given(spans(), st.integers(0, 9))
def test_copies_are_those_of_host_memory_and_their_digest_is_that_of_the_source(read: PoolSpan, seed: int) -> None:
    (source, source_bytes), (target, target_bytes), (_, expected) = (pool_of(each) for each in (1, 2, 2))
    write = elsewhere(read, seed)
    digest = target.copy_from(source, read, write, KEYS)
    expected.copy_from(source_bytes, read, write)
    assert np.array_equal(target_bytes.blocks, expected.blocks)
    assert digest == source.digest(read, KEYS) == target.digest(write, KEYS) == by_definition(source_bytes, read)


@given(spans())
def test_a_span_goes_over_host_memory_and_back_and_nothing_else_does(span: PoolSpan) -> None:
    (source, source_bytes), (target, target_bytes), (_, expected) = (pool_of(each) for each in (1, 2, 2))
    size = sum(part.size for part in source_bytes.slices(span))
    with source.on_host(span, STAGING, write=False) as (host, inner, _):
        packed = host.pack(inner, size)
    assert np.array_equal(packed, source_bytes.pack(span, size))
    with target.on_host(span, STAGING, write=True) as (host, inner, _):
        host.unpack(packed, inner)
    expected.copy_from(source_bytes, span, span)
    assert np.array_equal(target_bytes.blocks, expected.blocks)


@given(spans())
def test_a_packed_span_has_canonical_bytes_the_spans_digest_and_a_way_back(span: PoolSpan) -> None:
    (source, source_bytes), (target, target_bytes), (_, expected) = (pool_of(each) for each in (1, 2, 2))
    size = sum(part.size for part in source_bytes.slices(span))
    with source.staging.lease(size, receives=False) as staging:
        packed = source.pack(span, staging)
        assert np.array_equal(packed.numpy(), source_bytes.pack(span, size))
        assert source.digest_packed(packed, span, KEYS) == source.digest(span, KEYS)
        target.unpack(packed, span)
    expected.copy_from(source_bytes, span, span)
    assert np.array_equal(target_bytes.blocks, expected.blocks)


def test_a_write_over_host_memory_that_fails_changes_nothing() -> None:
    (target, target_bytes), (_, expected) = pool_of(2), pool_of(2)
    span = PoolSpan((1, 2), 4, 0, 3, 0, 4)

    def fail() -> None:
        with target.on_host(span, STAGING, write=True) as (host, _, _):
            host.blocks[...] = 0
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert np.array_equal(target_bytes.blocks, expected.blocks)


@settings(max_examples=300)
@given(spans(), st.data())
def test_every_flipped_bit_changes_the_digest(span: PoolSpan, data: st.DataObject) -> None:
    pool, seen = pool_of(3)
    before = pool.digest(span, KEYS)
    for _ in range(data.draw(st.integers(1, 3))):
        rows = list(_rows(seen, span))
        row = rows[data.draw(st.integers(0, len(rows) - 1))].reshape(-1)
        row[data.draw(st.integers(0, row.size - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    changed = not np.array_equal(seen.blocks, pool_of(3)[1].blocks)  # it may be the same bit twice
    assert (pool.digest(span, KEYS) != before) is changed


@settings(max_examples=200)
@given(spans(), st.data())
def test_swapped_words_rows_and_blocks_change_the_digest(span: PoolSpan, data: st.DataObject) -> None:
    pool, seen = pool_of(4)
    seen.blocks[...] = np.random.default_rng(5).choice([0, 0x80], seen.blocks.shape)  # sums alone would not notice
    before = pool.digest(span, KEYS)
    rows = list(_rows(seen, span))
    a, b = (rows[data.draw(st.integers(0, len(rows) - 1))] for _ in range(2))
    size = min(a.shape[0], b.shape[0])
    first, second = (0, size) if data.draw(st.booleans()) else (0, 1)
    kept = a[first:second].copy()
    a[first:second] = b[first:second]
    b[first:second] = kept
    changed = not np.array_equal(kept, a[first:second])
    assert (pool.digest(span, KEYS) != before) is changed


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_sign_bits_of_two_words_do_not_cancel(key: int, other: int) -> None:
    """What a plain sum of products modulo 2^64 over 64-bit words would not find."""
    words = torch.zeros(1, 1, 4, dtype=torch.int32)
    keys = DigestKeys(key, 4, CPU)
    before = keys.digest([words])
    words[..., 1] = words[..., 3] = -(2**31)
    assert keys.digest([words]) != before
    words[..., 0] = 1
    assert key == other or keys.digest([words]) != DigestKeys(other, 4, CPU).digest([words])


@given(spans())
def test_fewer_tokens_layers_or_blocks_have_another_digest(span: PoolSpan) -> None:
    pool, _ = pool_of(6)
    full = pool.digest(span, KEYS)
    shorter = [
        replace(span, last_block_tokens=span.last_block_tokens - 1),
        replace(span, layer_count=span.layer_count - 1),
        replace(span, head_count=span.head_count - 1),
        replace(span, block_ids=span.block_ids[1:]),
    ]
    for each in shorter:
        if each.last_block_tokens and each.layer_count and each.head_count and each.block_ids:
            assert pool.digest(each, KEYS) != full


def test_the_streams_grow_with_the_piece_and_stay_the_same() -> None:
    many = torch.arange(3000, dtype=torch.int32).view(3000, 1, 1)
    small = DigestKeys(KEY, 1, CPU)
    first = small.digest([many[:10]])
    assert small.digest([many]) == DigestKeys(KEY, 1, CPU).digest([many])
    assert small.digest([many[:10]]) == first


def test_scattered_blocks_and_runs_of_blocks_have_the_same_digest() -> None:
    (source, _), (target, _) = pool_of(1), pool_of(2)
    scattered = PoolSpan(SPREAD, 3, 1, 2, 1, 2)
    together = replace(scattered, block_ids=tuple(range(4, 4 + len(SPREAD))))
    assert target.copy_from(source, scattered, together, KEYS) == source.digest(scattered, KEYS)
    assert target.digest(together, KEYS) == source.digest(scattered, KEYS)


GPU = DeviceMemory("00000000-0000-0000-0000-000000000000", LAYOUT.pool_bytes, bytes(IPC_HANDLE_BYTES))


@pytest.mark.parametrize(
    ("memory", "field"),
    [
        (DeviceMemory(HOST_DEVICE, LAYOUT.pool_bytes - 1), "size_bytes"),
        (DeviceMemory(HOST_DEVICE, 1 << 62), "size_bytes"),
        (DeviceMemory(GPU.device, LAYOUT.pool_bytes, b"short"), "handle"),
        (DeviceMemory(GPU.device, LAYOUT.pool_bytes, GPU.handle, -8), "offset"),
        (DeviceMemory(GPU.device, LAYOUT.pool_bytes, GPU.handle, 4), "offset"),
        (GPU, "no GPU 0000"),
    ],
)
def test_memory_that_is_no_pool_of_this_layout_is_refused_by_its_field(memory: DeviceMemory, field: str) -> None:
    fd, _ = make_pool(LAYOUT)
    fds = [fd] if memory.device == HOST_DEVICE else []
    with pytest.raises(HandoffFault, match=field):
        open_pool(LAYOUT, memory, fds, writable=False)
    os.close(fd)


@pytest.mark.parametrize("memory", [None, DeviceMemory(HOST_DEVICE, LAYOUT.pool_bytes)])
def test_a_pool_without_its_descriptor_is_refused(memory: DeviceMemory | None) -> None:
    with pytest.raises(HandoffFault, match="expected 1 descriptors"):
        open_pool(LAYOUT, memory, [], writable=False)


def test_heads_of_odd_sizes_are_refused_by_the_field() -> None:
    odd = replace(LAYOUT, head_dim=3)
    with pytest.raises(HandoffFault, match=r"layout\.head_dim"):
        open_pool(odd, DeviceMemory(HOST_DEVICE, odd.pool_bytes), [0], writable=False)
