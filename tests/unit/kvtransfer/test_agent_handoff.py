"""Whole handoffs between real agent processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtransfer.control import Census, CloseReceive, LinkReport, ReceiveClosed, Received, Sent, TakeCensus
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker
from kvtransfer.versions import PROTOCOL_VERSION

MakeWorker = Callable[..., FakeWorker]


async def pair(
    make_worker: MakeWorker,
    model: FakeModel | None = None,
    *,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    **options: object,
) -> tuple[FakeWorker, FakeWorker]:
    prefill = make_worker("prefill-0", model, tp=prefill_tp, connects=True, **options)
    decode = make_worker("decode-0", model, tp=decode_tp, **options)
    await prefill.attach()
    await decode.attach()
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    return prefill, decode


async def complete(handoff: Handoff) -> tuple[list[Sent], list[Received]]:
    ticket_id = handoff.ticket_id
    sent = [await rank.expect(Sent, ticket_id=ticket_id) for rank in handoff.prefill.ranks]
    received = [await rank.expect(Received, ticket_id=ticket_id) for rank in handoff.decode.ranks]
    assert handoff.arrived()
    assert sum(each.bytes for each in sent) == sum(each.bytes for each in received)
    assert sum(each.pieces for each in sent) == sum(each.pieces for each in received)
    return sent, received


# Here the wider sender, the wider receiver that replicates heads, and equals; the plans of all are tests of `reshard`.
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "kv_heads"),
    [
        (2, 1, 4),
        (1, 4, 2),
        pytest.param(2, 2, 4, marks=pytest.mark.slow),
        *(pytest.param(*widths, marks=pytest.mark.soak_only) for widths in [(1, 1, 3), (1, 2, 4), (4, 1, 2)]),
    ],
)
async def test_blocks_arrive_for_any_pair_of_widths(
    make_worker: MakeWorker, prefill_tp: int, decode_tp: int, kv_heads: int
) -> None:
    prefill, decode = await pair(make_worker, FakeModel(kv_heads=kv_heads), prefill_tp=prefill_tp, decode_tp=decode_tp)
    handoff = Handoff.make(prefill, decode, tokens=27)  # a partial last block
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, 3)
    handoff.compute(3, handoff.kv.blocks)
    _, received = await complete(handoff)
    assert all(each.blocks == handoff.kv.blocks for each in received)


@pytest.mark.parametrize("packed", [False, True])
async def test_blocks_arrive_where_k_and_v_are_joined(make_worker: MakeWorker, packed: bool) -> None:
    model = FakeModel(head_dim=16, joined=True, packed=packed)
    prefill, decode = await pair(make_worker, model, prefill_tp=1, decode_tp=2)
    handoff = Handoff.make(prefill, decode, tokens=27)  # a partial last block
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, 3)
    handoff.compute(3, handoff.kv.blocks)
    await complete(handoff)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "protocol"), [(2, 1, PROTOCOL_VERSION), (1, 1, PROTOCOL_VERSION - 1)]
)
async def test_large_pieces_arrive_before_or_behind_their_digests(
    make_worker: MakeWorker, prefill_tp: int, decode_tp: int, protocol: int
) -> None:
    model = FakeModel(head_dim=1024, block_tokens=8)
    prefill, decode = await pair(make_worker, model, prefill_tp=prefill_tp, decode_tp=decode_tp, protocol=protocol)
    handoff = Handoff.make(prefill, decode, tokens=75)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 4)
    handoff.compute(4, handoff.kv.blocks)
    await complete(handoff)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [pytest.param(1, 1, marks=pytest.mark.soak_only), (2, 1)])
async def test_blocks_arrive_over_a_process_group(make_worker: MakeWorker, prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = await pair(
        make_worker, prefill_tp=prefill_tp, decode_tp=decode_tp, transport="process_group", ttl_s=60.0
    )
    await prefill.linked(timeout_s=60.0)
    for seed in range(2):
        handoff = Handoff.make(prefill, decode, tokens=27, seed=seed)
        handoff.open_receive()
        handoff.open_send()
        handoff.export_cached(0, 2)
        handoff.compute(2, handoff.kv.blocks)
        await complete(handoff)


async def test_cached_blocks_go_at_once_in_one_piece(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=40)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 6)
    handoff.compute(6, handoff.kv.blocks)
    sent, _ = await complete(handoff)
    assert sent[0].pieces == 1 + 1  # what was computed is so little that its layers are gathered


async def test_only_what_the_decode_worker_lacks_is_sent(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=40, first_block=4)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 6)
    handoff.compute(6, handoff.kv.blocks)
    sent, _ = await complete(handoff)
    assert sent[0].bytes == (handoff.kv.blocks - 4) * prefill.ranks[0].layout.block_bytes


async def test_ranges_that_come_before_the_ticket_are_held(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=13)
    handoff.open_receive()
    handoff.compute(0, handoff.kv.blocks)
    await prefill.linked()
    handoff.open_send()
    sent, _ = await complete(handoff)
    assert sent[0].pieces == 1  # the layers that were held go together


async def test_a_link_is_made_when_a_ticket_asks_for_it(make_worker: MakeWorker) -> None:
    prefill = make_worker("prefill-0", connects=False)
    decode = make_worker("decode-0", connects=False)
    await prefill.attach()
    await decode.attach()
    handoff = Handoff.make(prefill, decode, tokens=8)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, handoff.kv.blocks)
    prefill.set_peers_of(decode)  # the directory is late
    await complete(handoff)


@pytest.mark.parametrize("leaves", [False, True], ids=["other role", "leaves"])
async def test_a_link_that_a_change_of_pools_ends_is_closed_and_not_down(make_worker: MakeWorker, leaves: bool) -> None:
    prefill, decode = await pair(make_worker)
    await prefill.linked()
    prefill.connects = False
    prefill.set_peers_of(*([] if leaves else [decode]))
    rank = prefill.ranks[0]
    await rank.expect(LinkReport, state="closed")
    rank.send_as_leader(TakeCensus())
    await rank.expect(Census, links_out=0)
    later = [message.state for message in rank.messages if isinstance(message, LinkReport)]
    assert "down" not in later


async def test_nothing_to_send_and_nothing_to_receive_is_reported_at_once(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=16, first_block=4)
    handoff.open_receive()
    handoff.open_send()
    sent, received = await complete(handoff)
    assert (sent[0].bytes, received[0].bytes) == (0, 0)


async def test_without_digests_blocks_arrive_too(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, digests=False)
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, handoff.kv.blocks)
    await complete(handoff)


async def test_many_tickets_share_a_link(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, num_blocks=256)
    handoffs = [Handoff.make(prefill, decode, tokens=27, seed=seed) for seed in range(8)]
    free = list(range(256))
    for handoff in handoffs:
        handoff.source_ids = handoff.target_ids = tuple(free.pop() for _ in range(handoff.kv.blocks))
        handoff.open_receive()
        handoff.open_send()
    for handoff in handoffs:
        handoff.compute(0, handoff.kv.blocks)
    for handoff in handoffs:
        await complete(handoff)


async def test_closing_what_is_over_is_answered(make_worker: MakeWorker) -> None:
    _, decode = await pair(make_worker)
    decode.ranks[0].send_as_leader(CloseReceive("0" * 32))
    await decode.ranks[0].expect(ReceiveClosed, ticket_id="0" * 32)


@pytest.mark.parametrize(
    ("transport", "old", "new"),
    [  # each transport and each old half once; the rest of the product is for `make soak`
        ("mapped", "prefill", "decode"),
        ("process_group", "decode", "prefill"),
        pytest.param("mapped", "decode", "prefill", marks=pytest.mark.soak_only),
        pytest.param("process_group", "prefill", "decode", marks=pytest.mark.soak_only),
    ],
)
@pytest.mark.slow
async def test_a_worker_of_the_version_before_still_exchanges_blocks(
    make_worker: MakeWorker, transport: str, old: str, new: str
) -> None:
    speaks = {old: PROTOCOL_VERSION - 1, new: PROTOCOL_VERSION}
    prefill = make_worker("prefill-0", connects=True, protocol=speaks["prefill"], transport=transport)
    decode = make_worker("decode-0", protocol=speaks["decode"], transport=transport)
    await prefill.attach()
    await decode.attach()
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, handoff.kv.blocks)
    await complete(handoff)
