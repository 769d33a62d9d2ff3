"""Garbage, mutated messages and frames, forged and replayed tickets: no agent crashes, grows or serves others worse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvtransfer.connection.handshake import Hello, Refused, Welcome
from kvtransfer.connection.sockets import split_address
from kvtransfer.control import (
    CloseReceive,
    CloseSend,
    Lead,
    OpenReceive,
    OpenSend,
    ReceiveFailed,
    SendFailed,
    Sent,
)
from kvtransfer.link.in_link import PLACES_AHEAD
from kvtransfer.pool.pool import payload_bytes
from kvtransfer.session.piece import HEADER_BYTES, FrameType, Header, Piece
from kvtransfer.session.reshard import reshard_plan
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.pool import make_pool
from kvtransfer.testing.worker import FakeModel, FakeRank, FakeWorker
from kvtransfer.versions import PROTOCOL_VERSION
from tandem.rpc.channel import encode

Soak = Callable[[int, int], int]
MakeWorker = Callable[..., FakeWorker]
pytestmark = pytest.mark.soak
MAX_GROWTH_KB = 50 * 1024
ANSWERS = msgspec.msgpack.Decoder(Welcome | Refused)


class Mutator:
    """Changes real messages a little, or replaces them by noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, data: bytes) -> bytes:
        choose, changed = self.random, bytearray(data)
        match choose.randrange(7):
            case 0:
                return choose.randbytes(choose.randrange(1, 4096))
            case 1:
                del changed[choose.randrange(len(changed)) :]
            case 2:
                at = choose.randrange(len(changed))
                changed[at:at] = changed[: choose.randrange(1, 200)]
            case 3:
                at = choose.randrange(len(changed))
                changed[at : at + 4] = choose.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\x7f"))
            case _:
                for _ in range(choose.choice((1, 1, 2, 8))):
                    changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
        return bytes(changed)


def resident_kb(rank: FakeRank) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{rank.process.pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0])


@contextlib.contextmanager
def survives(*ranks: FakeRank) -> Iterator[None]:
    """They neither die nor grow."""
    before = [(rank.process, resident_kb(rank)) for rank in ranks]
    yield
    for rank, (process, kb) in zip(ranks, before, strict=True):
        assert rank.process is process
        assert process.poll() is None
        assert resident_kb(rank) - kb < MAX_GROWTH_KB


def assert_quiet(*workers: FakeWorker) -> None:
    """Nothing that came was a surprise: no exception went unhandled. Ends the agents, which log those at their end."""
    for worker in workers:
        worker.stop()
        for rank in worker.ranks:
            logged = rank.log.read_text()
            assert "attached rank" in logged
            assert "Traceback" not in logged


async def pair(make_worker: MakeWorker, model: FakeModel | None = None) -> tuple[FakeWorker, FakeWorker]:
    prefill = make_worker("prefill-0", model, connects=True, ttl_s=10.0)
    decode = make_worker("decode-0", model, ttl_s=10.0)
    await prefill.attach()
    await decode.attach()
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    await prefill.linked()
    return prefill, decode


async def assert_works(prefill: FakeWorker, decode: FakeWorker, seed: int = 7) -> Handoff:
    handoff = Handoff.make(prefill, decode, tokens=27, seed=seed)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, handoff.kv.blocks)
    await prefill.ranks[0].expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()
    return handoff


def make_hello(sender: FakeWorker, receiver: FakeWorker, transport: str) -> Hello:
    model, (link,) = sender.model, reshard_plan(1, 1, sender.model.kv_heads)
    return Hello(
        protocol=PROTOCOL_VERSION,
        transport=transport,
        worker_id=sender.worker_id,
        epoch=sender.epoch,
        rank=0,
        tp=1,
        to_worker=receiver.worker_id,
        to_epoch=receiver.epoch,
        to_rank=0,
        model_kv_heads=model.kv_heads,
        model_fingerprint=model.fingerprint,
        layout=sender.ranks[0].attach_message().layout,
        link=(link.head_start, link.head_count, link.src_head, link.dst_head),
        digests=True,
    )


def connect(raw: socket.socket, address: str | tuple[str, int]) -> None:
    """Waits while the agent has more connections to accept than its backlog holds."""
    for _ in range(6000):
        try:
            return raw.connect(address)
        except BlockingIOError:
            time.sleep(0.01)
    raise TimeoutError("the agent accepts nothing")


def send_and_leave(address: str | tuple[str, int], data: bytes, fds: list[int] | None = None) -> None:
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as raw:
        raw.settimeout(60.0)
        connect(raw, address)
        with contextlib.suppress(ConnectionError, TimeoutError):
            if fds:
                socket.send_fds(raw, [data], fds)
            else:
                raw.sendall(data)


async def test_mutated_first_messages_on_every_port_change_nothing(make_worker: MakeWorker, soak: Soak) -> None:
    count = soak(10_000, 600)
    prefill, decode = await pair(make_worker)
    rank, mutate = decode.ranks[0], Mutator(1)
    ports: list[tuple[str | tuple[str, int], bytes]] = [
        (str(rank.socket_path), encode(rank.attach_message())),
        (str(rank.socket_path), encode(Lead())),
        (str(rank.link_path), encode(make_hello(prefill, decode, "mapped"))),
        (split_address(decode.attached[0].tcp_address), encode(make_hello(prefill, decode, "mapped"))),
    ]
    with survives(rank):
        for number in range(count):
            address, message = ports[number % len(ports)]
            fds = [0, 1, 2, 0] if number % 9 == 0 and isinstance(address, str) else None
            await asyncio.to_thread(send_and_leave, address, mutate(message), fds)
        await assert_works(prefill, decode)
    assert_quiet(prefill, decode)


async def test_mutated_messages_of_a_leader_change_nothing(make_worker: MakeWorker, soak: Soak) -> None:
    count = soak(10_000, 600)
    prefill, decode = await pair(make_worker)
    handoff = Handoff.make(prefill, decode, tokens=27)
    ticket = handoff.ticket
    messages = [
        encode(OpenReceive(ticket.ticket_id, "prefill-0", prefill.epoch, 0, handoff.target_ids, 27)),
        encode(OpenSend(ticket.ticket_id, ticket.sign(decode.key), "x", "decode-0", decode.epoch, 0, 27)),
        encode(CloseReceive(ticket.ticket_id)),
        encode(CloseSend(ticket.ticket_id)),
    ]
    mutate = Mutator(2)
    with survives(prefill.ranks[0], decode.ranks[0]):
        for number in range(count):
            data = encode(Lead()) + messages[number % 4] + mutate(messages[number // 4 % 4])
            await asyncio.to_thread(send_and_leave, str((prefill, decode)[number % 2].ranks[0].socket_path), data)
        await assert_works(prefill, decode, seed=8)
    assert_quiet(prefill, decode)


class RawLink:
    """A link made by hand by a sender of our own pool."""

    def __init__(self, sender: FakeWorker, receiver: FakeWorker) -> None:
        self._hello = encode(make_hello(sender, receiver, "mapped"))
        self._path = str(receiver.ranks[0].link_path)
        self._pool_fd, _ = make_pool(sender.ranks[0].layout)
        self.raw = socket.socket(socket.AF_UNIX)

    def open(self) -> None:
        self.raw.close()
        self.raw = socket.socket(socket.AF_UNIX)
        self.raw.settimeout(60.0)
        connect(self.raw, self._path)
        probe = os.memfd_create("probe")
        os.write(probe, bytes(4096))
        socket.send_fds(self.raw, [self._hello], [self._pool_fd, probe])
        os.close(probe)
        size = int.from_bytes(self._read(4), "little")
        assert isinstance(ANSWERS.decode(self._read(size)), Welcome)
        self.raw.sendall(Header(FrameType.PROBE).pack())
        while Header.unpack(self._read(HEADER_BYTES)).type is not FrameType.PROBED:
            pass

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.raw.recv(size - len(data))
            if not chunk:
                raise ConnectionError("the agent closed the link")
            data += chunk
        return data

    def answer_to(self, ticket_id: str) -> tuple[Header, bytes]:
        while True:
            header = Header.unpack(self._read(HEADER_BYTES))
            body = self._read(header.body_bytes)
            if header.ticket_id == ticket_id:
                return header, body

    def close(self) -> None:
        self.raw.close()
        os.close(self._pool_fd)


@pytest.mark.acceptance(34, here="1,000 frames", soak="10,000")
async def test_mutated_frames_on_a_link_change_nothing(make_worker: MakeWorker, soak: Soak) -> None:
    count = soak(10_000, 1000)
    prefill, decode = await pair(make_worker)
    rank, mutate = decode.ranks[0], Mutator(3)
    handoff = Handoff.make(prefill, decode, tokens=27)
    ticket_id, signed = handoff.ticket_id, handoff.ticket.sign(decode.key)
    size = payload_bytes(rank.layout, 2, 4, 3, 4)
    piece = Piece(0, 0, 2, 0, 3, 0, 4, "float32", 4, size, digest=5)
    frames = [
        Header(FrameType.OPEN, ticket_id, body_bytes=len(signed)).pack() + signed,
        Header(FrameType.PIECE, ticket_id, piece=piece, body_bytes=8).pack() + array("I", (1, 2)).tobytes(),
        *(Header(kind, ticket_id, seq=1).pack() for kind in FrameType if kind is not FrameType.PIECE),
    ]
    link = RawLink(prefill, decode)

    def attack() -> int:
        """One link with a few frames; returns how many."""
        burst = mutate.random.randrange(1, 12)
        with contextlib.suppress(ConnectionError, TimeoutError):
            link.open()
            for _ in range(burst):
                frame = mutate.random.choice(frames)
                link.raw.sendall(frame if mutate.random.random() < 0.2 else mutate(frame))
        return burst

    handoff.open_receive()
    sent = 0
    with survives(rank):
        while sent < count:
            sent += await asyncio.to_thread(attack)
        link.close()
        await rank.expect(ReceiveFailed, ticket_id=ticket_id)
        await assert_works(prefill, decode, seed=9)
    assert_quiet(prefill, decode)


@pytest.mark.slow
async def test_a_sender_that_reads_no_answers_is_dropped(make_worker: MakeWorker) -> None:
    """What it is owed does not pile up in the agent."""
    prefill, decode = await pair(make_worker)
    link = RawLink(prefill, decode)
    abort = Header(FrameType.ABORT, "0" * 32).pack() * 1000

    def flood() -> None:
        link.open()
        for _ in range(1000):
            link.raw.sendall(abort)

    with survives(decode.ranks[0]):
        with pytest.raises((ConnectionError, TimeoutError)):
            await asyncio.to_thread(flood)
        await assert_works(prefill, decode)
    link.close()


async def test_a_sender_that_owes_digests_is_dropped(make_worker: MakeWorker) -> None:
    """Also of pieces that are refused: what waits for their digests does not pile up in the agent."""
    model = FakeModel(head_dim=1024, block_tokens=8)
    prefill, decode = await pair(make_worker, model)
    used = await assert_works(prefill, decode)
    link = RawLink(prefill, decode)
    size = payload_bytes(decode.ranks[0].layout, 1, 8, model.layers, model.kv_heads)

    def owe() -> None:
        link.open()
        for seq in range(20):
            piece = Piece(seq, 0, 1, 0, model.layers, 0, model.kv_heads, model.dtype, 8, size, 1)
            link.raw.sendall(Header(FrameType.PIECE, used.ticket_id, piece=piece, body_bytes=4).pack() + bytes(4))
        while True:
            header, _ = link.answer_to(used.ticket_id)
            answers.append(header.type)

    answers: list[FrameType] = []
    with survives(decode.ranks[0]):
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(owe)
        assert {*answers} <= {FrameType.FAIL}  # a reset connection may lose the last ones
        assert len(answers) <= PLACES_AHEAD + 1
        await assert_works(prefill, decode, seed=8)
    link.close()


@pytest.mark.acceptance(38, here="tickets, as stated", soak="the same")
async def test_forged_and_replayed_tickets_are_refused_on_a_raw_link(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    used = await assert_works(prefill, decode, seed=10)
    link = RawLink(prefill, decode)
    open_now = Handoff.make(prefill, decode, tokens=27, seed=11)
    open_now.open_receive()
    signed = open_now.ticket.sign(decode.key)
    forged = signed[:40] + bytes([signed[40] ^ 1]) + signed[41:]

    def show(ticket_id: str, ticket: bytes) -> tuple[FrameType, bytes]:
        link.raw.sendall(Header(FrameType.OPEN, ticket_id, body_bytes=len(ticket)).pack() + ticket)
        header, body = link.answer_to(ticket_id)
        return header.type, body

    await asyncio.to_thread(link.open)
    for ticket_id, ticket in (
        (used.ticket_id, used.ticket.sign(decode.key)),  # replayed
        (open_now.ticket_id, forged),
        (open_now.ticket_id, open_now.ticket.sign(bytes(32))),  # another key
        ("1" * 32, signed),  # announced under another name
    ):
        kind, body = await asyncio.to_thread(show, ticket_id, ticket)
        assert (kind, body.partition(b"\n")[0]) == (FrameType.FAIL, b"refused_ticket")
    assert (await asyncio.to_thread(show, open_now.ticket_id, signed))[0] is FrameType.ACCEPT
    again, _ = await asyncio.to_thread(show, open_now.ticket_id, signed)
    assert again is FrameType.FAIL
    link.close()
    failed = await decode.ranks[0].expect(ReceiveFailed, ticket_id=open_now.ticket_id)
    assert failed.cause == "peer_lost"


async def test_a_ticket_that_was_used_is_refused_to_the_same_sender(make_worker: MakeWorker) -> None:
    prefill, decode = await pair(make_worker)
    used = await assert_works(prefill, decode, seed=12)
    used.open_send()
    failed = await prefill.ranks[0].expect(SendFailed, ticket_id=used.ticket_id)
    assert failed.cause == "refused_ticket"
