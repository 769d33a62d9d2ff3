"""The layout's sizes are those of the tensor it describes."""

from __future__ import annotations

import math

import pytest

from tandem.kvcache.layout import KvPoolLayout, blocks_for


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3", 1)]
)
def test_sizes_nest(dtype: str, element_bytes: int, sides: int) -> None:
    layout = KvPoolLayout(5, 3, kv_heads=2, block_tokens=16, head_dim=8, dtype=dtype, joined=sides == 1)
    assert layout.pool_bytes == math.prod(layout.shape) * element_bytes
    assert layout.pool_bytes == 5 * layout.block_bytes == 5 * 3 * layout.layer_bytes
    assert layout.layer_bytes == sides * 2 * layout.head_bytes == sides * 2 * 16 * layout.token_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_a_partial_block_counts_whole(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
