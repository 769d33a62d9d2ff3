"""Whole handoffs between real agent processes whose links carry int8."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvtransfer.control import LinkReport, Received, Sent
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker
from kvtransfer.versions import PROTOCOL_VERSION

MakeWorker = Callable[..., FakeWorker]
MODEL = FakeModel(head_dim=64)


def floats(handoff: Handoff) -> np.ndarray:
    return handoff.kv.data.view(np.float32)


def fill_with_numbers(handoff: Handoff) -> None:
    """Random bytes are no sensible numbers."""
    shape = floats(handoff).shape
    floats(handoff)[...] = np.random.default_rng(5).standard_normal(shape, np.float32)


def arrived(handoff: Handoff) -> np.ndarray:
    """What the decode worker's one rank has, in the prompt's order."""
    return handoff.decode.ranks[0].pool.blocks[list(handoff.target_ids)].view(np.float32)


async def set_peers_of(prefill: FakeWorker, decode: FakeWorker) -> None:
    await prefill.attach()
    await decode.attach()
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)


async def hand_off(prefill: FakeWorker, decode: FakeWorker) -> Handoff:
    handoff = Handoff.make(prefill, decode, tokens=28)  # whole blocks
    fill_with_numbers(handoff)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 2)
    handoff.compute(2, handoff.kv.blocks)
    for rank in prefill.ranks:
        await rank.expect(Sent, ticket_id=handoff.ticket_id, timeout_s=30.0)
    for rank in decode.ranks:
        await rank.expect(Received, ticket_id=handoff.ticket_id)
    return handoff


PATHS = [
    ("tcp", 1),
    pytest.param("tcp", 2, marks=pytest.mark.slow),
    pytest.param("process_group", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("transport", "prefill_tp"),
    PATHS,
)
async def test_numbers_arrive_nearly_as_they_were(make_worker: MakeWorker, transport: str, prefill_tp: int) -> None:
    prefill = make_worker("prefill-0", MODEL, tp=prefill_tp, connects=True, transport=transport, int8=True)
    decode = make_worker("decode-0", MODEL, transport=transport, int8=True)
    await set_peers_of(prefill, decode)
    handoff = await hand_off(prefill, decode)
    error = np.abs(arrived(handoff) - floats(handoff))
    assert 0 < error.max() <= np.abs(floats(handoff)).max() / 127
    report = await decode.ranks[0].expect(LinkReport, state="ready")
    while not report.bytes:
        report = await decode.ranks[0].expect(LinkReport, state="ready")
    assert report.bytes < handoff.kv.data.nbytes * 0.28


async def test_shared_memory_carries_the_pool_as_it_is(make_worker: MakeWorker) -> None:
    prefill = make_worker("prefill-0", MODEL, connects=True, int8=True)
    decode = make_worker("decode-0", MODEL, int8=True)
    await set_peers_of(prefill, decode)
    handoff = await hand_off(prefill, decode)
    assert np.array_equal(arrived(handoff), floats(handoff))


async def test_a_worker_of_the_version_before_gets_the_pool_as_it_is(make_worker: MakeWorker) -> None:
    prefill = make_worker("prefill-0", MODEL, connects=True, transport="tcp", int8=True)
    decode = make_worker("decode-0", MODEL, transport="tcp", protocol=PROTOCOL_VERSION - 1)
    await set_peers_of(prefill, decode)
    handoff = await hand_off(prefill, decode)
    assert np.array_equal(arrived(handoff), floats(handoff))


async def test_int8_that_only_one_side_wants_is_refused(make_worker: MakeWorker) -> None:
    prefill = make_worker("prefill-0", MODEL, connects=True, transport="tcp", int8=True)
    decode = make_worker("decode-0", MODEL, transport="tcp")
    await set_peers_of(prefill, decode)
    report = await prefill.ranks[0].expect(LinkReport, state="refused")
    assert "transfer.wire_dtype" in report.reason
