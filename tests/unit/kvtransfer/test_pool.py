from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.causes import HandoffFault
from kvtransfer.pool import digest
from kvtransfer.pool.digest import STREAM_BYTES, copy_and_digest, digest_of, digest_of_bytes, start_digest
from kvtransfer.pool.pool import PoolMap, PoolSpan
from kvtransfer.testing.pool import make_pool
from tandem.kvcache.layout import KvPoolLayout

LAYOUT = KvPoolLayout(num_blocks=12, layers=3, kv_heads=4, block_tokens=4, head_dim=8, dtype="float32")
JOINED = replace(LAYOUT, joined=True)
BIG = KvPoolLayout(num_blocks=12, layers=2, kv_heads=3, block_tokens=16, head_dim=64, dtype="float32")

HUGE = KvPoolLayout(num_blocks=6, layers=4, kv_heads=4, block_tokens=16, head_dim=192, dtype="float32")


@pytest.fixture(params=["native", "xxhash"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library that a machine with a compiler has, and without."""
    if request.param == "xxhash":
        monkeypatch.setattr(digest, "native", lambda: None)
    else:
        assert digest.native() is not None


def pool_of(layout: KvPoolLayout, seed: int) -> PoolMap:
    pool = PoolMap(layout, bytearray(layout.pool_bytes))
    pool.blocks[...] = np.random.default_rng(seed).integers(0, 256, pool.blocks.shape, np.uint8)
    return pool


@st.composite
def spans(draw: st.DrawFn, layout: KvPoolLayout) -> PoolSpan:
    ids = draw(st.lists(st.integers(0, layout.num_blocks - 1), min_size=1, unique=True))
    if draw(st.booleans()):
        ids.sort()
    layer, head = draw(st.integers(0, layout.layers - 1)), draw(st.integers(0, layout.kv_heads - 1))
    return PoolSpan(
        tuple(ids),
        draw(st.integers(1, layout.block_tokens)),
        layer,
        draw(st.integers(1, layout.layers - layer)),
        head,
        draw(st.integers(1, layout.kv_heads - head)),
    )


def canonical(pool: PoolMap, span: PoolSpan) -> bytes:
    """Straight from the definition: block, layer, K/V, head, valid tokens."""
    out = b""
    for index, block in enumerate(span.block_ids):
        last = index == len(span.block_ids) - 1
        valid = span.last_block_tokens if last else pool.layout.block_tokens
        for layer in range(span.layer_start, span.layer_start + span.layer_count):
            for side in range(pool.layout.sides):
                for head in range(span.head_start, span.head_start + span.head_count):
                    out += pool.blocks[block, layer, side, head, :valid].tobytes()
    return out


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("layout", [LAYOUT, BIG, JOINED])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_digest_and_pack_follow_the_canonical_order(layout: KvPoolLayout, data: st.DataObject) -> None:
    span = data.draw(spans(layout))
    pool = pool_of(layout, 1)
    expected = canonical(pool, span)
    assert digest_of(pool, span) == xxhash.xxh3_64_intdigest(expected) == digest_of_bytes(expected)
    assert pool.pack(span, len(expected)).tobytes() == expected


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("layout", [LAYOUT, BIG, JOINED])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.slow
def test_a_span_can_be_read_and_written_any_number_of_cells_at_a_time(
    layout: KvPoolLayout, data: st.DataObject
) -> None:
    span = data.draw(spans(layout))
    source, target = pool_of(layout, 1), pool_of(layout, 2)
    expected = canonical(source, span)
    reading, writing = source.cursor(span), target.cursor(span)
    read, written = (start_digest(len(expected), layout.token_bytes) for _ in range(2))
    left = len(expected) // layout.token_bytes
    while left:
        count = data.draw(st.integers(1, left))
        buffer = np.empty(count * layout.token_bytes, np.uint8)
        reading.read(buffer, read)
        writing.write(buffer, written)
        left -= count
    assert canonical(target, span) == expected
    assert read.value() == written.value() == xxhash.xxh3_64_intdigest(expected)


@given(data=st.data())
def test_a_span_can_be_read_and_written_any_number_of_bytes_at_a_time(data: st.DataObject) -> None:
    span = data.draw(spans(LAYOUT))
    source, target = pool_of(LAYOUT, 1), pool_of(LAYOUT, 2)
    reading, writing = source.cursor(span), target.cursor(span)
    left = len(canonical(source, span))
    while left:
        size = data.draw(st.integers(1, left))
        buffer = np.empty(size, np.uint8)
        reading.read(buffer)
        writing.write(buffer)
        left -= size
    assert canonical(target, span) == canonical(source, span)


@given(spans(LAYOUT))
def test_copies_touch_the_span_and_nothing_else(read: PoolSpan) -> None:
    source, target, staged, cleared = (pool_of(LAYOUT, seed) for seed in (1, 2, 2, 2))
    ids = np.random.default_rng(len(read.block_ids)).permutation(LAYOUT.num_blocks)[: len(read.block_ids)]
    head_start = LAYOUT.kv_heads - read.head_count
    write = replace(read, block_ids=tuple(ids.tolist()), head_start=head_start)
    payload = canonical(source, read)
    assert copy_and_digest(target, source, read, write) == xxhash.xxh3_64_intdigest(payload)
    staged.unpack(source.pack(read, len(payload)), write)
    assert canonical(target, write) == payload
    assert np.array_equal(target.blocks, staged.blocks)
    for pool in (target, cleared):
        for part in pool.slices(write):
            part[...] = 0
    assert np.array_equal(target.blocks, cleared.blocks)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("heads", [(0, 4), (1, 2)])
@pytest.mark.parametrize("layers", [(0, 4), (1, 1), (0, 3)])
@pytest.mark.parametrize("ids", [(0, 1, 2, 3, 4, 5), (4, 5, 0, 1, 2), (3,)])
def test_copies_larger_than_one_stretch_are_whole(
    ids: tuple[int, ...], layers: tuple[int, int], heads: tuple[int, int]
) -> None:
    source, target = pool_of(HUGE, 1), pool_of(HUGE, 2)
    assert HUGE.block_bytes * 2 > STREAM_BYTES > HUGE.block_bytes
    span = PoolSpan(ids, 5, *layers, *heads)
    expected = canonical(source, span)
    assert copy_and_digest(target, source, span, span) == xxhash.xxh3_64_intdigest(expected)
    assert canonical(target, span) == expected


@pytest.mark.parametrize(
    "span",
    [
        PoolSpan((12,), 4, 0, 1, 0, 1),
        PoolSpan((-1,), 4, 0, 1, 0, 1),
        PoolSpan((), 4, 0, 1, 0, 1),
        PoolSpan((0,), 5, 0, 1, 0, 1),
        PoolSpan((0,), 4, 2, 2, 0, 1),
        PoolSpan((0,), 4, 0, 1, 3, 2),
    ],
)
def test_a_span_outside_the_pool_is_refused(span: PoolSpan) -> None:
    with pytest.raises(HandoffFault):
        pool_of(LAYOUT, 0).check(span)


def test_only_a_sealed_pool_of_the_right_size_is_mapped() -> None:
    fd, pool = make_pool(LAYOUT)
    pool.blocks[3] = 7
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    mapped = PoolMap.map_fd(LAYOUT, read_only, writable=False)
    assert int(mapped.blocks[3].min()) == 7
    with pytest.raises(ValueError, match="read-only"):
        mapped.blocks[3] = 8
    with pytest.raises(HandoffFault, match="bytes"):
        PoolMap.map_fd(BIG, fd, writable=False)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, LAYOUT.pool_bytes)
    with pytest.raises(HandoffFault, match="sealed"):
        PoolMap.map_fd(LAYOUT, unsealed, writable=False)
    for each in (fd, read_only, unsealed):
        os.close(each)
