"""Whole handoffs over `tcp`, plain and with TLS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.control import LinkReport, Received, Sent, TlsFiles
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker

MakeWorker = Callable[..., FakeWorker]
LARGE = FakeModel(layers=3, kv_heads=8, block_tokens=16, head_dim=128)  # long runs


@pytest.fixture(params=[pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="tls")])
def tls(request: pytest.FixtureRequest, authority: Callable[[str], Any]) -> TlsFiles | None:
    return TlsFiles(**authority("ours").issue("worker")) if request.param else None


async def pair(
    make_worker: MakeWorker,
    tls: TlsFiles | None,
    model: FakeModel | None = None,
    *,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    **options: object,
) -> tuple[FakeWorker, FakeWorker]:
    options = {"transport": "tcp", "tls": tls, **options}
    prefill = make_worker("prefill-0", model, tp=prefill_tp, connects=True, **options)
    decode = make_worker("decode-0", model, tp=decode_tp, **options)
    await prefill.attach()
    await decode.attach()
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    return prefill, decode


async def complete(handoff: Handoff) -> tuple[list[Sent], list[Received]]:
    sent = [await rank.expect(Sent, ticket_id=handoff.ticket_id) for rank in handoff.prefill.ranks]
    received = [await rank.expect(Received, ticket_id=handoff.ticket_id) for rank in handoff.decode.ranks]
    assert handoff.arrived()
    assert sum(each.bytes for each in sent) == sum(each.bytes for each in received)
    return sent, received


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "kv_heads"),
    [
        (2, 1, 4),
        pytest.param(1, 4, 2, marks=pytest.mark.slow),
        *(pytest.param(*widths, marks=pytest.mark.soak_only) for widths in [(1, 1, 3), (1, 2, 4)]),
    ],
)
async def test_blocks_arrive_for_any_pair_of_widths(
    make_worker: MakeWorker, tls: TlsFiles | None, prefill_tp: int, decode_tp: int, kv_heads: int
) -> None:
    model = FakeModel(kv_heads=kv_heads)
    prefill, decode = await pair(make_worker, tls, model, prefill_tp=prefill_tp, decode_tp=decode_tp)
    for seed in range(2):
        handoff = Handoff.make(prefill, decode, tokens=27, seed=seed)  # a partial last block
        handoff.open_receive()
        handoff.open_send()
        handoff.export_cached(0, 2)
        handoff.compute(2, handoff.kv.blocks)
        await complete(handoff)
    report = await prefill.ranks[0].expect(LinkReport, state="ready")
    assert report.transport == "tcp"


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "digests"),
    [  # each width once; the rest of the product is for `make soak`
        (2, 1, False),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [(1, 1, True), (1, 2, True)]),
        *(pytest.param(*rest, marks=pytest.mark.soak_only) for rest in [(1, 1, False), (2, 1, True), (1, 2, False)]),
    ],
)
async def test_large_blocks_arrive_straight_from_pool_to_pool(
    make_worker: MakeWorker, tls: TlsFiles | None, prefill_tp: int, decode_tp: int, digests: bool
) -> None:
    prefill, decode = await pair(
        make_worker, tls, LARGE, prefill_tp=prefill_tp, decode_tp=decode_tp, digests=digests, num_blocks=64
    )
    handoff = Handoff.make(prefill, decode, tokens=60 * 16 - 5)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 40)
    handoff.compute(40, handoff.kv.blocks)
    await complete(handoff)


async def test_only_what_the_decode_worker_lacks_is_sent(make_worker: MakeWorker, tls: TlsFiles | None) -> None:
    prefill, decode = await pair(make_worker, tls)
    handoff = Handoff.make(prefill, decode, tokens=40, first_block=4)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 6)
    handoff.compute(6, handoff.kv.blocks)
    sent, _ = await complete(handoff)
    assert sent[0].bytes == (handoff.kv.blocks - 4) * prefill.ranks[0].layout.block_bytes


async def test_on_one_host_auto_stays_mapped_even_with_tls(
    make_worker: MakeWorker, authority: Callable[[str], Any]
) -> None:
    files = TlsFiles(**authority("ours").issue("worker"))
    prefill, _ = await pair(make_worker, files, transport="auto")
    assert (await prefill.ranks[0].expect(LinkReport, state="ready")).transport == "mapped"


async def test_an_agent_with_tcp_links_stays_small_and_knows_no_torch(
    make_worker: MakeWorker, tls: TlsFiles | None
) -> None:
    prefill, decode = await pair(make_worker, tls)
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, handoff.kv.blocks)
    await complete(handoff)
    for rank in (prefill.ranks[0], decode.ranks[0]):
        proc = Path(f"/proc/{rank.process.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        assert int(status["VmRSS"].split()[0]) < 64 * 1024
        assert "libtorch" not in (proc / "maps").read_text()
