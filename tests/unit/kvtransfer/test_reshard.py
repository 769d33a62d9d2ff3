from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.connection.handshake import Shape
from kvtransfer.session.reshard import check_compatible, heads_of_rank, reshard_plan
from tandem.errors import IncompatiblePools

SHAPE = Shape("model", "float32", 2, 4, 64, 16, 1, "", False, False, 2, 1)


def fits(tp: int, kv_heads: int) -> bool:
    return tp > kv_heads or kv_heads % tp == 0


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_every_decode_head_arrives_exactly_once(prefill_tp: int, decode_tp: int, kv_heads: int) -> None:
    if not fits(prefill_tp, kv_heads) or not fits(decode_tp, kv_heads):
        with pytest.raises(IncompatiblePools, match="cannot be divided"):
            reshard_plan(prefill_tp, decode_tp, kv_heads)
        return
    plan = reshard_plan(prefill_tp, decode_tp, kv_heads)
    arrived: Counter[tuple[int, int]] = Counter()
    for link in plan:
        source = heads_of_rank(prefill_tp, kv_heads, link.prefill_rank)
        target = heads_of_rank(decode_tp, kv_heads, link.decode_rank)
        for offset in range(link.head_count):
            head = link.head_start + offset
            assert source[link.src_head + offset] == head
            assert target[link.dst_head + offset] == head
            arrived[(link.decode_rank, head)] += 1
    needed = {(rank, head) for rank in range(decode_tp) for head in heads_of_rank(decode_tp, kv_heads, rank)}
    assert arrived == Counter(needed)
    pairs = [(link.prefill_rank, link.decode_rank) for link in plan]
    assert len(set(pairs)) == len(pairs)


def test_replicas_share_the_work() -> None:
    plan = reshard_plan(prefill_tp=4, decode_tp=4, kv_heads=2)
    assert sorted(link.prefill_rank for link in plan) == [0, 1, 2, 3]


def test_one_decode_rank_takes_each_head_from_one_replica() -> None:
    plan = reshard_plan(prefill_tp=4, decode_tp=1, kv_heads=2)
    assert [(link.prefill_rank, link.head_start, link.dst_head) for link in plan] == [(0, 0, 0), (2, 1, 1)]


def test_a_refusal_says_which_widths_fit() -> None:
    with pytest.raises(IncompatiblePools, match=r"\[1, 3\]"):
        reshard_plan(2, 1, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_fingerprint", "other"),
        ("adapter", "lora-1"),
        ("dtype", "bfloat16"),
        ("layers", 3),
        ("kv_heads", 8),
        ("joined", True),
        ("packed", True),
        ("head_dim", 128),
        ("block_tokens", 32),
    ],
)
def test_what_differs_is_named_with_both_values(name: str, value: object) -> None:
    other = replace(SHAPE, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePools) as refusal:
        check_compatible(SHAPE, other)
    assert refusal.value.field == name
    assert repr(value) in refusal.value.message
    assert repr(getattr(SHAPE, name)) in refusal.value.message


def test_widths_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(IncompatiblePools):
        check_compatible(SHAPE, replace(SHAPE, tp=3))
    check_compatible(replace(SHAPE, tp=2), replace(SHAPE, tp=8))
