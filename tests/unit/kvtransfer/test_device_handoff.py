"""Whole handoffs between pools that are used as those in GPU memory are, on the device that every machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtransfer.control import LinkReport, Received, Sent
from kvtransfer.testing import FakeWorker, Handoff

MakeWorker = Callable[..., FakeWorker]


async def pair(
    make_worker: MakeWorker,
    *,
    devices: tuple[str, str] = ("cpu", "cpu"),
    tp: tuple[int, int] = (1, 1),
    **options: object,
) -> tuple[FakeWorker, FakeWorker]:
    options = {"ttl_s": 60.0} | options
    prefill = make_worker("prefill-0", tp=tp[0], connects=True, device=devices[0], **options)
    decode = make_worker("decode-0", tp=tp[1], device=devices[1], **options)
    await prefill.attach()
    await decode.attach()
    prefill.meet(decode)
    decode.meet(prefill)
    return prefill, decode


async def complete(handoff: Handoff) -> None:
    for rank in handoff.prefill.ranks:
        await rank.expect(Sent, ticket_id=handoff.ticket_id)
    for rank in handoff.decode.ranks:
        await rank.expect(Received, ticket_id=handoff.ticket_id)
    assert handoff.arrived()


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("digests", [True, False])
async def test_blocks_arrive(make_worker: MakeWorker, tp: tuple[int, int], digests: bool) -> None:
    prefill, decode = await pair(make_worker, tp=tp, digests=digests)
    for seed in range(2):
        handoff = Handoff.make(prefill, decode, tokens=27, seed=seed)
        handoff.open_receive()
        handoff.open_send()
        handoff.export_cached(0, 2)
        handoff.compute(2, handoff.kv.blocks)
        await complete(handoff)
    assert (await prefill.ranks[0].expect(LinkReport, state="ready")).transport == "mapped"
