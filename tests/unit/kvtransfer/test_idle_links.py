"""Links that no ticket uses are closed if there are many, and open again when they are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvtransfer.control import (
    Census,
    ChangePeers,
    LinkReport,
    LinkState,
    Received,
    ReceiveFailed,
    SendFailed,
    Sent,
    TakeCensus,
)
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker

MakeWorker = Callable[..., FakeWorker]
ONE_WARM = ("kvtransfer.testing.agent", "--warm-links", "1")


async def cluster(make_worker: MakeWorker, count: int = 3) -> tuple[FakeWorker, list[FakeWorker]]:
    """A prefill worker that keeps one link open, and decode workers to each of which its link was ready once."""
    model = FakeModel()
    prefill = make_worker("prefill-0", model, connects=True, transport="tcp", launcher=ONE_WARM)
    decodes = [make_worker(f"decode-{number}", model, transport="tcp") for number in range(count)]
    for worker in (prefill, *decodes):
        await worker.attach()
    for decode in decodes:
        decode.set_peers_of(prefill)
    prefill.set_peers_of(*decodes)
    for _ in range(count):
        await prefill.ranks[0].expect(LinkReport, state="ready")
    return prefill, decodes


async def hand_over(prefill: FakeWorker, decode: FakeWorker, seed: int) -> None:
    handoff = Handoff.make(prefill, decode, tokens=27, seed=seed)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, handoff.kv.blocks)
    await decode.ranks[0].expect(Received, ticket_id=handoff.ticket_id)
    await prefill.ranks[0].expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()


async def open_links(worker: FakeWorker) -> int:
    """Both ways."""
    worker.ranks[0].send_as_leader(TakeCensus())
    census = await worker.ranks[0].expect(Census)
    return census.links_out + census.links_in


async def test_links_are_proved_and_then_all_but_the_last_used_rest(make_worker: MakeWorker) -> None:
    prefill, _ = await cluster(make_worker)
    resting = [await prefill.ranks[0].expect(LinkReport, state="idle") for _ in range(2)]
    assert len({report.peer_worker for report in resting}) == 2
    assert all(report.latency_s is not None for report in resting), "it was measured"
    assert await open_links(prefill) == 1


async def test_a_link_that_rests_opens_for_a_ticket_and_no_handoff_fails(make_worker: MakeWorker) -> None:
    prefill, decodes = await cluster(make_worker)
    for _ in range(2):
        await prefill.ranks[0].expect(LinkReport, state="idle")
    for seed in range(9):
        await hand_over(prefill, decodes[seed % 3], seed)
    assert await open_links(prefill) <= 3
    assert not [each for each in decodes for message in each.ranks[0].messages if isinstance(message, ReceiveFailed)]


async def test_a_lease_waits_for_a_link_that_rests_but_not_for_a_sender_that_left(make_worker: MakeWorker) -> None:
    prefill, decodes = await cluster(make_worker)
    report = await prefill.ranks[0].expect(LinkReport, state="idle")
    decode = next(each for each in decodes if each.worker_id == report.peer_worker)
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    decode.ranks[0].send_as_leader(ChangePeers((), ((prefill.worker_id, prefill.epoch),)))
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)
    assert "left the directory" in failed.message


async def many_senders(make_worker: MakeWorker, transport: str) -> tuple[list[FakeWorker], FakeWorker]:
    """Prefill workers that would keep their links, and a decode worker that keeps one; all were ready once."""
    device = "cpu" if transport == "nccl" else ""
    options = {"transport": transport, "device": device, "ttl_s": 60.0}
    prefills = [make_worker(f"prefill-{number}", connects=True, **options) for number in range(3)]
    decode = make_worker("decode-0", launcher=ONE_WARM, **options)
    for worker in (decode, *prefills):
        await worker.attach()
    decode.set_peers_of(*prefills)
    for prefill in prefills:
        prefill.set_peers_of(decode)
        await prefill.linked(timeout_s=60.0)
    return prefills, decode


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nccl", marks=pytest.mark.slow)])
async def test_incoming_links_rest_too_and_open_for_a_ticket(make_worker: MakeWorker, transport: str) -> None:
    prefills, decode = await many_senders(make_worker, transport)
    for _ in range(2):
        await decode.ranks[0].expect(LinkReport, state="idle")
    assert await open_links(decode) == 1
    for seed in range(9):
        await hand_over(prefills[seed % 3], decode, seed)
    assert await open_links(decode) <= 3
    for worker in (*prefills, decode):
        assert not [each for each in worker.ranks[0].messages if isinstance(each, ReceiveFailed | SendFailed)]
        assert not [each for each in reports(worker) if each.state == LinkState.DOWN]


def reports(worker: FakeWorker) -> list[LinkReport]:
    return [each for each in worker.ranks[0].messages if isinstance(each, LinkReport)]


async def test_links_of_both_ways_count_together(make_worker: MakeWorker) -> None:
    """A decode worker that also sends keeps one link in all."""
    prefills, decode = await many_senders(make_worker, "tcp")
    other = make_worker("decode-1", transport="tcp")
    await other.attach()
    other.set_peers_of(decode)
    decode.connects = True
    decode.set_peers_of(*prefills, other)
    await decode.ranks[0].expect(LinkReport, state="ready", peer_worker=other.worker_id)
    async with asyncio.timeout(30.0):
        while await open_links(decode) > 1:
            await asyncio.sleep(0.1)
    await hand_over(decode, other, 1)
    await hand_over(prefills[0], decode, 2)
