"""Whole handoffs over `tcp`, plain and with TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtransfer.control import Received, Sent
from kvtransfer.testing import FakeModel, FakeWorker, Handoff

MakeWorker = Callable[..., FakeWorker]


async def pair(
    make_worker: MakeWorker, model: FakeModel | None = None, *, prefill_tp: int = 1, decode_tp: int = 1
) -> tuple[FakeWorker, FakeWorker]:
    prefill = make_worker("prefill-0", model, tp=prefill_tp, connects=True, transport="tcp")
    decode = make_worker("decode-0", model, tp=decode_tp, transport="tcp")
    await prefill.attach()
    await decode.attach()
    prefill.meet(decode)
    decode.meet(prefill)
    return prefill, decode


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
async def test_blocks_arrive(make_worker: MakeWorker, prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = await pair(make_worker, prefill_tp=prefill_tp, decode_tp=decode_tp)
    await prefill.linked()
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 2)
    handoff.compute(2, handoff.kv.blocks)
    for rank in decode.ranks:
        await rank.expect(Received, ticket_id=handoff.ticket_id)
    for rank in prefill.ranks:
        await rank.expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()
