"""Every byte of a span is in exactly one batch, in canonical order, whatever the shape of its runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.pool.pool import PoolMap, PoolSpan, make_staging
from kvtransfer.transports.batches import BATCH_BYTES, batches
from tandem.kvcache.layout import KvPoolLayout

MAX_BUFFERS = 1024  # what the kernel takes at once


def filled(layout: KvPoolLayout, seed: int) -> PoolMap:
    pool = PoolMap(layout, bytearray(layout.pool_bytes))
    pool.blocks[...] = np.random.default_rng(seed).integers(0, 256, pool.blocks.shape, np.uint8)
    return pool


def size_of(pool: PoolMap, span: PoolSpan) -> int:
    return sum(part.size for part in pool.slices(span))


@st.composite
def spans(draw: st.DrawFn, layout: KvPoolLayout) -> PoolSpan:
    ids = draw(st.lists(st.integers(0, layout.num_blocks - 1), min_size=1, unique=True))
    layer = draw(st.integers(0, layout.layers - 1))
    head = draw(st.integers(0, layout.kv_heads - 1))
    return PoolSpan(
        tuple(sorted(ids) if draw(st.booleans()) else ids),
        draw(st.integers(1, layout.block_tokens)),
        layer,
        draw(st.integers(1, layout.layers - layer)),
        head,
        draw(st.integers(1, layout.kv_heads - head)),
    )


LAYOUTS = [
    KvPoolLayout(24, 3, 4, 4, 8, "float32"),  # runs of some hundred bytes
    KvPoolLayout(12, 3, 8, 16, 128, "bfloat16"),  # 4 KiB of a head, 64 KiB of a layer
    KvPoolLayout(5, 2, 2, 128, 128, "float32"),  # 64 KiB of a head
    KvPoolLayout(24, 3, 4, 4, 8, "float32", joined=True),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60)
@given(data=st.data())
def test_batches_are_the_span(layout: KvPoolLayout, data: st.DataObject) -> None:
    span = data.draw(spans(layout))
    source, target, scratch = filled(layout, 1), filled(layout, 2), make_staging(BATCH_BYTES)
    wire = bytearray()
    for batch in batches(source, span, scratch):
        batch.gather()
        assert 0 < batch.size == sum(len(view) for view in batch.views) <= BATCH_BYTES
        assert len(batch.views) <= MAX_BUFFERS
        for view in batch.views:
            wire += view
    size = size_of(source, span)
    assert bytes(wire) == source.pack(span, size).tobytes()

    expected = PoolMap(layout, bytearray(target.blocks.tobytes()))
    expected.unpack(np.frombuffer(bytes(wire), np.uint8), span)
    rest = memoryview(wire)
    for batch in batches(target, span, scratch):
        for view in batch.views:
            view[:] = rest[: len(view)]
            rest = rest[len(view) :]
        batch.scatter()
    assert np.array_equal(target.blocks, expected.blocks), "nothing beside the span was written"
    assert not rest


def test_long_runs_are_used_where_they_lie() -> None:
    pool = filled(LAYOUTS[1], 1)
    begin = pool.blocks.ctypes.data
    end = begin + pool.blocks.nbytes
    for batch in batches(pool, PoolSpan((0, 1, 2, 7), 16, 0, 3, 0, 8), make_staging(BATCH_BYTES)):
        for view in batch.views:
            assert begin <= np.frombuffer(view, np.uint8).ctypes.data < end
