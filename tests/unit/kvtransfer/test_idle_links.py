"""Links that no ticket uses are closed if there are many, and open again when they are needed."""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.control import Census, ChangePeers, LinkReport, Received, ReceiveFailed, Sent, TakeCensus
from kvtransfer.testing.handoff import FakeModel, FakeWorker, Handoff

MakeWorker = Callable[..., FakeWorker]
ONE_WARM = ("-m", "kvtransfer.testing.agent", "--warm-links", "1")


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
    worker.ranks[0].send_as_leader(TakeCensus())
    return (await worker.ranks[0].expect(Census)).links_out


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
