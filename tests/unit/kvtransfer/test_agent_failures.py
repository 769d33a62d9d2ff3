"""What goes wrong between agents, and that it ends in one typed report, quickly, and never in wrong blocks."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtransfer.control import (
    Attached,
    CloseReceive,
    CloseSend,
    LinkReport,
    OpenReceive,
    ReceiveClosed,
    Received,
    ReceiveFailed,
    SendClosed,
    SendFailed,
    Sent,
    SetPeers,
    StillComputing,
)
from kvtransfer.testing.agent import faults_of
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeRank, FakeWorker
from tandem.testing.models import FaultSettings

MakeWorker = Callable[..., FakeWorker]
QUICK_S = 15.0  # of deadlines of 30 s; a busy machine may take seconds
HANG_S = 60.0
SLOW_S = 0.6


def faulty(point: str, kind: str, *, delay_s: float = 0.0) -> tuple[str, ...]:
    settings = FaultSettings(every=1, points=(point,), kinds=(kind,), delay_s=delay_s)
    return ("kvtransfer.testing.agent", "--faults", settings.to_json())


SLOW = faulty("place", "delay", delay_s=SLOW_S)


async def pair(
    make_worker: MakeWorker,
    *,
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
    link: bool = True,
) -> tuple[FakeWorker, FakeWorker]:
    sender = make_worker("prefill-0", **{"connects": True, **(prefill or {})})
    receiver = make_worker("decode-0", **(decode or {}))
    await sender.attach()
    await receiver.attach()
    sender.set_peers_of(receiver)
    receiver.set_peers_of(sender)
    if link:
        await sender.linked()
    return sender, receiver


async def assert_works(prefill: FakeWorker, decode: FakeWorker) -> None:
    handoff = Handoff.make(prefill, decode, tokens=27, seed=99)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, handoff.kv.blocks)
    for rank in decode.ranks:
        await rank.expect(Received, ticket_id=handoff.ticket_id)
    for rank in prefill.ranks:
        await rank.expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()


def started(prefill: FakeWorker, decode: FakeWorker, *, tokens: int = 27, ttl_s: float = 30.0) -> Handoff:
    """A handoff in the middle: its first blocks were pushed, more is to come."""
    handoff = Handoff.make(prefill, decode, tokens=tokens, ttl_s=ttl_s)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, 3)
    return handoff


async def until_pushed(handoff: Handoff) -> None:
    """Until the first blocks of a `started` handoff are there, so that its ticket was accepted by every rank."""
    async with asyncio.timeout(HANG_S):
        while not all(rank.holds(handoff.kv, handoff.target_ids[:3]) for rank in handoff.decode.ranks):
            await asyncio.sleep(0.01)


async def until_slow_write(rank: FakeRank) -> float:
    """Until a `SLOW` write is under way. Returns the wall clock's time of its beginning."""
    noted = faults_of(rank.socket_path)
    async with asyncio.timeout(HANG_S):
        while not noted.exists():
            await asyncio.sleep(0.01)
    return noted.stat().st_mtime


@pytest.mark.parametrize("point", ["digest", "memory"])
async def test_corrupted_blocks_are_never_received(make_worker: MakeWorker, point: str) -> None:
    prefill, decode = await pair(make_worker, prefill={"launcher": faulty(point, "flip")})
    handoff = started(prefill, decode)
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "digest_mismatch"
    told = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id)
    assert told.cause == "digest_mismatch"


async def test_a_piece_that_comes_twice_fails_the_ticket(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, prefill={"launcher": faulty("piece", "duplicate")})
    handoff = started(prefill, decode)
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "protocol"


async def test_block_ids_beyond_the_senders_pool_are_refused(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(
        make_worker, prefill={"launcher": faulty("blocks", "misaddress"), "digests": False}, decode={"digests": False}
    )
    handoff = started(prefill, decode)
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "protocol"


async def test_a_probe_that_arrives_corrupted_refuses_the_link(make_worker: MakeWorker) -> None:
    prefill, _ = await pair(make_worker, prefill={"launcher": faulty("send_probe", "flip")}, link=False)
    report = await prefill.ranks[0].expect(LinkReport, state="refused")
    assert "probe" in report.reason


async def test_pools_that_differ_are_refused_with_both_values(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, decode={"model": FakeModel(dtype="bfloat16")}, link=False)
    report = await prefill.ranks[0].expect(LinkReport, state="refused")
    assert "bfloat16" in report.reason
    assert "float32" in report.reason
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_send()
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
    assert failed.cause == "transport"


async def test_a_forced_transport_that_the_peer_lacks_is_refused(make_worker: MakeWorker) -> None:
    prefill, _ = await pair(
        make_worker, prefill={"transport": "mapped"}, decode={"transport": "process_group"}, link=False
    )
    report = await prefill.ranks[0].expect(LinkReport, state="refused")
    assert "mapped" in report.reason


async def test_a_forged_ticket_is_refused(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    handoff.open_send(key=secrets.token_bytes(32))
    handoff.compute(0, handoff.kv.blocks)
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
    assert failed.cause == "refused_ticket"
    assert not decode.ranks[0].pool.blocks.any()
    await assert_works(prefill, decode)


async def test_a_ticket_that_names_other_blocks_than_the_lease_is_refused(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    handoff.ticket = replace(handoff.ticket, first_block=1, block_count=handoff.ticket.block_count - 1)
    handoff.open_send()
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
    assert failed.cause == "refused_ticket"


async def test_an_expired_lease_refuses_its_ticket(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, decode={"ttl_s": 0.3})
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "deadline"
    handoff.open_send()
    refused = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
    assert refused.cause == "refused_ticket"


async def test_a_prefill_that_is_still_computed_outlives_the_deadlines_of_both_sides(make_worker: MakeWorker) -> None:
    ttl_s = 4.0
    prefill, decode = await pair(make_worker, decode={"ttl_s": ttl_s})
    handoff = started(prefill, decode, ttl_s=ttl_s)
    end_s = asyncio.get_running_loop().time() + 2 * ttl_s
    while asyncio.get_running_loop().time() < end_s:
        prefill.ranks[0].send_as_leader(StillComputing())
        await asyncio.sleep(0.5)
    handoff.compute(3, handoff.kv.blocks)
    await decode.ranks[0].expect(Received, ticket_id=handoff.ticket_id)
    await prefill.ranks[0].expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()


async def test_a_prefill_that_stalls_ends_at_the_deadline_on_both_sides(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, decode={"ttl_s": 2.0})  # in which the ticket must arrive
    handoff = started(prefill, decode, ttl_s=5.0)
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "deadline"
    told = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id)
    assert told.cause == "deadline"


async def test_a_ticket_of_another_life_is_stale(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.ticket = replace(handoff.ticket, prefill_epoch=1)
    handoff.open_send()
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "stale_epoch"


async def test_a_restarted_peer_on_the_same_path_is_not_taken_for_the_old_one(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, link=False)
    old = SetPeers(tuple(msgspec.structs.replace(peer, epoch=5) for peer in decode.peers()))
    prefill.ranks[0].send_as_leader(old)
    report = await prefill.ranks[0].expect(LinkReport, state="refused", peer_epoch=5)
    assert "is for" in report.reason


async def test_closing_a_receive_stops_every_write(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, decode={"launcher": SLOW})
    handoff = started(prefill, decode)
    rank = decode.ranks[0]
    await until_slow_write(rank)
    rank.send_as_leader(CloseReceive(handoff.ticket_id))
    await rank.expect(ReceiveClosed, ticket_id=handoff.ticket_id)
    rank.pool.blocks[...] = 0xEE
    handoff.compute(3, handoff.kv.blocks)
    await asyncio.sleep(1.0)
    assert (rank.pool.blocks == 0xEE).all()
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "cancelled"


async def test_closing_a_send_waits_for_the_receiver(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, decode={"launcher": SLOW})
    handoff = started(prefill, decode)
    began_s = await until_slow_write(decode.ranks[0])  # the receiver is reading our blocks
    prefill.ranks[0].send_as_leader(CloseSend(handoff.ticket_id))
    await prefill.ranks[0].expect(SendClosed, ticket_id=handoff.ticket_id)
    assert time.time() - began_s > 0.9 * SLOW_S
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "cancelled"


async def test_one_failing_rank_ends_the_ticket_on_the_others(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker, prefill={"tp": 2})
    handoff = started(prefill, decode)
    await until_pushed(handoff)
    prefill.ranks[0].send_as_leader(CloseSend(handoff.ticket_id))
    await prefill.ranks[0].expect(SendClosed, ticket_id=handoff.ticket_id)
    assert (await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id)).cause == "cancelled"
    assert (await prefill.ranks[1].expect(SendFailed, ticket_id=handoff.ticket_id)).cause == "cancelled"


@pytest.mark.parametrize(
    ("victim", "transport"),
    [  # tcp, with either victim, is in test_tcp_failures.py too
        ("prefill", "mapped"),
        ("decode", "mapped"),
        pytest.param("decode", "process_group", marks=pytest.mark.slow),
        ("prefill", "tcp"),
        pytest.param("prefill", "process_group", marks=pytest.mark.soak_only),
        pytest.param("decode", "tcp", marks=pytest.mark.soak_only),
    ],
)
async def test_a_killed_peer_is_noticed_at_once_and_its_next_life_works(
    make_worker: MakeWorker, victim: str, transport: str
) -> None:
    options: dict[str, object] = {"transport": transport, "ttl_s": 30.0}
    prefill, decode = await pair(make_worker, prefill=options, decode=options)
    handoff = started(prefill, decode, ttl_s=30.0)
    await until_pushed(handoff)
    dead: FakeRank = (prefill if victim == "prefill" else decode).ranks[0]
    os.kill(dead.process.pid, signal.SIGKILL)
    dead.process.wait()
    if victim == "prefill":
        received = await decode.ranks[0].expect(ReceiveFailed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
        assert received.cause == "peer_lost"
    else:
        sent = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
        assert sent.cause == "peer_lost"
        prefill.ranks[0].send_as_leader(CloseSend(handoff.ticket_id))
        await prefill.ranks[0].expect(SendClosed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
    dead.start_agent()
    where = await dead.expect(Attached)
    assert dead.lost == 1
    (prefill if victim == "prefill" else decode).attached[0] = where
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    await assert_works(prefill, decode)


async def test_a_peer_that_left_the_directory_ends_its_tickets(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = started(prefill, decode)
    prefill.set_peers_of()
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
    assert failed.cause == "peer_lost"
    late = Handoff.make(prefill, decode, tokens=8)
    late.open_send()
    refused = await prefill.ranks[0].expect(SendFailed, ticket_id=late.ticket_id, timeout_s=QUICK_S)
    assert refused.cause == "stale_epoch"


async def test_a_decode_worker_that_never_appears_is_given_up(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=8, ttl_s=0.3)
    handoff.ticket = replace(handoff.ticket, decode_epoch=77)
    handoff.open_send()
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id)
    assert failed.cause == "deadline"


async def test_a_lease_that_makes_no_sense_fails(make_worker: MakeWorker) -> None:
    decode = make_worker("decode-0")
    await decode.attach()
    decode.ranks[0].send_as_leader(OpenReceive("a" * 32, "prefill-0", 1, 0, (1, 1), 8))
    assert (await decode.ranks[0].expect(ReceiveFailed)).cause == "protocol"


async def test_noise_on_every_listener_changes_nothing(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    generator = np.random.default_rng(1)
    host, port = decode.attached[0].tcp_address.rsplit(":", 1)
    rank = decode.ranks[0]
    for family, address in (
        (socket.AF_UNIX, str(rank.socket_path)),
        (socket.AF_UNIX, str(rank.link_path)),
        (socket.AF_INET, (host, int(port))),
    ):
        for prefix in (b"", b"\x10\x00\x00\x00", b"\xff\xff\xff\xff"):
            with socket.socket(family) as raw:
                raw.connect(address)
                try:
                    raw.sendall(prefix + generator.integers(0, 256, 5000, np.uint8).tobytes())
                except (BrokenPipeError, ConnectionResetError):
                    pass  # it was refused already
    await asyncio.sleep(0.2)
    assert rank.process.poll() is None
    await assert_works(prefill, decode)


async def test_the_agent_dies_with_its_rank(make_worker: MakeWorker) -> None:
    decode = make_worker("decode-0")
    await decode.attach()
    decode.ranks[0].disconnect()
    assert await asyncio.to_thread(decode.ranks[0].process.wait, HANG_S) == 0


async def test_sigterm_ends_the_agent_cleanly(make_worker: MakeWorker) -> None:
    decode = make_worker("decode-0")
    await decode.attach()
    decode.ranks[0].process.terminate()
    assert await asyncio.to_thread(decode.ranks[0].process.wait, HANG_S) == 0


async def test_an_agent_with_mapped_links_stays_small_and_knows_no_torch(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    await assert_works(prefill, decode)
    pid = prefill.ranks[0].process.pid
    status = dict(line.split(":", 1) for line in proc_file(pid, "status").splitlines())
    assert int(status["VmRSS"].split()[0]) < 64 * 1024
    assert "libtorch" not in proc_file(pid, "maps")


def proc_file(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()
