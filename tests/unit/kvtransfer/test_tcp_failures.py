"""What goes wrong on `tcp` links: pieces that are flipped, cut short or refused, peers that hang or die, strangers."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.connection.data_socket import DataSocket, connect_data
from kvtransfer.connection.handshake import Hello, Welcome, receive_answer
from kvtransfer.connection.sockets import connect_tcp, join_address, send_first, split_address
from kvtransfer.connection.stream import FrameStream
from kvtransfer.control import (
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
    TlsFiles,
)
from kvtransfer.pool.digest import digest_of_bytes
from kvtransfer.pool.pool import payload_bytes
from kvtransfer.session.piece import FrameType, Header, Piece
from kvtransfer.session.ticket import Ticket
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker
from kvtransfer.versions import PROTOCOL_VERSION
from tandem.rpc.channel import encode

pytestmark = pytest.mark.slow  # test_agent_failures.py shows the same causes on `mapped` links

MakeWorker = Callable[..., FakeWorker]
Authority = Callable[[str], Any]
ByHand = Callable[..., Awaitable["HandSender"]]
QUICK_S = 15.0  # of deadlines of 30 s; a busy machine may take seconds
IDLE_S = 2.0  # in which a ticket must arrive
LARGE = FakeModel(layers=8, kv_heads=8, block_tokens=16, head_dim=128)  # 1 MiB for each block


def files_for(way: str, authority: Authority, name: str = "ours") -> TlsFiles | None:
    return TlsFiles(**authority(name).issue("worker")) if way == "tls" else None


class HandSender:
    """A sending agent made by hand, which does what it should unless told otherwise. tp 1 to tp 1."""

    worker_id, epoch = "by-hand", 7

    def __init__(self, decode: FakeWorker) -> None:
        self.decode = decode
        self.layout = decode.ranks[0].layout
        self.stream: FrameStream
        self.data: DataSocket
        self._opened = ExitStack()
        self.welcome: Welcome

    async def shake_hands(self) -> Welcome:
        decode, model = self.decode, self.decode.model
        raw = await connect_tcp(decode.attached[0].tcp_address)
        layout = decode.ranks[0].attach_message().layout
        hello = Hello(
            PROTOCOL_VERSION, "tcp", self.worker_id, self.epoch, 0, 1, decode.worker_id, decode.epoch, 0,
            model.kv_heads, model.fingerprint, layout, (0, model.kv_heads, 0, 0), True,
        )  # fmt: skip
        await send_first(raw, encode(hello), [])
        self.welcome = await receive_answer(raw, QUICK_S)
        self.stream = await FrameStream.over(raw)
        self._opened.callback(self.stream.close)
        return self.welcome

    @property
    def data_address(self) -> str:
        return join_address(split_address(self.decode.attached[0].tcp_address)[0], self.welcome.data_port or 0)

    async def connect_data(self) -> None:
        self.data = await connect_data(self.data_address, self.welcome.data_token, None, QUICK_S)
        self._opened.callback(self.data.close)
        probe = secrets.token_bytes(4096)
        self.stream.send(Header(FrameType.PROBE))
        self.data.send([memoryview(probe)])
        header = await self.answer()
        assert (header.type, header.digest) == (FrameType.PROBED, digest_of_bytes(probe))

    async def answer(self) -> Header:
        """The next frame that is not a sign of life."""
        while True:
            async with asyncio.timeout(QUICK_S):
                frame = await self.stream.receive()
            assert frame is not None
            if frame[0].type is not FrameType.HEARTBEAT:
                return frame[0]

    async def open(self, blocks: int) -> str:
        """A ticket for the first blocks of the pool, leased and accepted."""
        decode, tokens = self.decode, blocks * self.layout.block_tokens
        ticket = Ticket(
            secrets.token_hex(16), "request", decode.worker_id, decode.epoch, self.worker_id, self.epoch,
            0, blocks, tokens, 30.0,
        )  # fmt: skip
        lease = OpenReceive(ticket.ticket_id, self.worker_id, self.epoch, 0, tuple(range(blocks)), tokens)
        decode.ranks[0].send_as_leader(lease)
        self.stream.send(Header(FrameType.OPEN, ticket.ticket_id), ticket.sign(decode.key))
        assert (await self.answer()).type is FrameType.ACCEPT
        return ticket.ticket_id

    def piece(self, blocks: int, *, first: int = 0, seq: int = 0) -> Piece:
        it = self.layout
        size = payload_bytes(it, blocks, it.block_tokens, it.layers, it.kv_heads)
        return Piece(seq, first, blocks, 0, it.layers, 0, it.kv_heads, it.dtype, it.block_tokens, size, 1234)

    def announce(self, ticket_id: str, piece: Piece) -> None:
        self.stream.send(Header(FrameType.PIECE, ticket_id, piece=piece))

    def send_payload(self, piece: Piece, payload: bytes, *, flip: bool = False) -> None:
        trailer = struct.pack("<Q", digest_of_bytes(payload) ^ (piece.digest or 0))
        if flip:
            payload = payload[:-1] + bytes([payload[-1] ^ 1])
        self.data.send([memoryview(payload), memoryview(trailer)])

    def close(self) -> None:
        self._opened.close()


@pytest.fixture
async def by_hand(make_worker: MakeWorker) -> AsyncIterator[ByHand]:
    """A sender, met by a real receiver."""
    made: list[HandSender] = []

    async def make(**options: object) -> HandSender:
        decode = make_worker("decode-0", FakeModel(), transport="tcp", **options)
        await decode.attach()
        made.append(HandSender(decode))
        await made[-1].shake_hands()
        return made[-1]

    yield make
    for sender in made:
        sender.close()


async def pair(
    make_worker: MakeWorker,
    model: FakeModel | None = None,
    *,
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
) -> tuple[FakeWorker, FakeWorker]:
    sender = make_worker("prefill-0", model, **{"connects": True, "transport": "tcp", **(prefill or {})})
    receiver = make_worker("decode-0", model, **{"transport": "tcp", **(decode or {})})
    await sender.attach()
    await receiver.attach()
    sender.set_peers_of(receiver)
    receiver.set_peers_of(sender)
    return sender, receiver


def begin(prefill: FakeWorker, decode: FakeWorker, tokens: int, *, left: int = 0) -> Handoff:
    """Exports all blocks but the last `left`."""
    handoff = Handoff.make(prefill, decode, tokens=tokens, ttl_s=30.0)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, handoff.kv.blocks - left)
    return handoff


async def assert_works(prefill: FakeWorker, decode: FakeWorker) -> None:
    handoff = begin(prefill, decode, 27)
    await decode.ranks[0].expect(Received, ticket_id=handoff.ticket_id)
    await prefill.ranks[0].expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()


# --- pieces ------------------------------------------------------------------------------------------------------


async def test_a_piece_is_written_where_it_belongs(by_hand: ByHand) -> None:
    sender = await by_hand()
    await sender.connect_data()
    ticket_id, piece = await sender.open(4), sender.piece(4)
    payload = secrets.token_bytes(piece.payload_bytes)
    sender.announce(ticket_id, piece)
    sender.send_payload(piece, payload)
    assert (await sender.answer()).type is FrameType.ACK
    assert sender.decode.ranks[0].pool.blocks[:4].tobytes() == payload


@pytest.mark.parametrize("what", ["payload", "number", "blocks"])
async def test_a_piece_that_was_changed_on_its_way_is_never_acknowledged(by_hand: ByHand, what: str) -> None:
    sender = await by_hand()
    await sender.connect_data()
    ticket_id, piece = await sender.open(4), sender.piece(2)
    payload = secrets.token_bytes(piece.payload_bytes)
    if what == "blocks":  # the header arrives with other blocks than it left with
        raw = bytearray(Header(FrameType.PIECE, ticket_id, piece=piece).pack())
        raw[24] = 2
        sender.stream._writer.write(raw)
    else:
        sender.announce(ticket_id, piece if what == "payload" else replace(piece, digest=99))
    sender.send_payload(piece, payload, flip=what == "payload")
    assert (await sender.answer()).type is FrameType.FAIL
    failed = await sender.decode.ranks[0].expect(ReceiveFailed, ticket_id=ticket_id)
    assert failed.cause == "digest_mismatch"


async def test_a_refused_piece_leaves_the_link_in_step(by_hand: ByHand) -> None:
    sender = await by_hand()
    await sender.connect_data()
    wrong, right = await sender.open(2), await sender.open(4)
    rank = sender.decode.ranks[0]
    rank.send_as_leader(CloseReceive(wrong))
    await rank.expect(ReceiveClosed, ticket_id=wrong)
    await sender.answer()  # it was told
    for _ in range(3):
        late = sender.piece(2)
        sender.announce(wrong, late)
        sender.send_payload(late, secrets.token_bytes(late.payload_bytes))
        assert (await sender.answer()).type is FrameType.FAIL
    assert not rank.pool.blocks.any(), "nothing of a refused piece is written"
    piece = sender.piece(4)
    payload = secrets.token_bytes(piece.payload_bytes)
    sender.announce(right, piece)
    sender.send_payload(piece, payload)
    assert (await sender.answer()).type is FrameType.ACK
    assert rank.pool.blocks[:4].tobytes() == payload


async def test_a_piece_without_a_digest_ends_the_link(by_hand: ByHand) -> None:
    sender = await by_hand()
    await sender.connect_data()
    ticket_id = await sender.open(2)
    sender.announce(ticket_id, replace(sender.piece(2), digest=None))
    failed = await sender.decode.ranks[0].expect(ReceiveFailed, ticket_id=ticket_id, timeout_s=QUICK_S)
    assert failed.cause == "protocol"


# --- peers that die or hang ---------------------------------------------------------------------------------------


async def test_a_sender_that_dies_in_mid_piece_is_noticed_at_once(by_hand: ByHand) -> None:
    sender = await by_hand()
    await sender.connect_data()
    ticket_id, piece = await sender.open(4), sender.piece(4)
    sender.announce(ticket_id, piece)
    sender.data.send([memoryview(bytes(piece.payload_bytes // 2))])
    await asyncio.sleep(0.2)
    sender.close()
    failed = await sender.decode.ranks[0].expect(ReceiveFailed, ticket_id=ticket_id, timeout_s=QUICK_S)
    assert failed.cause == "peer_lost"


async def test_a_sender_that_hangs_in_mid_piece_is_given_up(by_hand: ByHand) -> None:
    sender = await by_hand(ttl_s=IDLE_S)
    await sender.connect_data()
    ticket_id, piece = await sender.open(4), sender.piece(4)
    sender.announce(ticket_id, piece)
    sender.data.send([memoryview(bytes(piece.payload_bytes // 2))])
    rank = sender.decode.ranks[0]
    rank.send_as_leader(CloseReceive(ticket_id))
    await rank.expect(ReceiveClosed, ticket_id=ticket_id, timeout_s=IDLE_S + QUICK_S)
    written = rank.pool.blocks.copy()
    try:
        sender.send_payload(piece, b"\xff" * piece.payload_bytes)
    except Exception:  # the link has ended, in whatever way this side hears of it
        pass
    await asyncio.sleep(0.2)
    assert (rank.pool.blocks == written).all(), "nothing is written after the handoff was closed"


@pytest.mark.parametrize(
    ("victim", "way"),
    [  # each once
        ("prefill", "plain"),
        ("decode", "tls"),
        pytest.param("prefill", "tls", marks=pytest.mark.soak_only),
        pytest.param("decode", "plain", marks=pytest.mark.soak_only),
    ],
)
async def test_an_agent_killed_in_a_transfer_is_noticed_at_once(
    make_worker: MakeWorker, authority: Authority, victim: str, way: str
) -> None:
    options: dict[str, object] = {"ttl_s": 30.0, "num_blocks": 96, "tls": files_for(way, authority)}
    prefill, decode = await pair(make_worker, LARGE, prefill=options, decode=options)
    await prefill.linked()
    dead, alive = (prefill, decode) if victim == "prefill" else (decode, prefill)
    handoff = begin(prefill, decode, 96 * 16, left=1)  # it cannot end before the kill
    async with asyncio.timeout(QUICK_S):
        while not decode.ranks[0].pool.blocks[handoff.target_ids[0]].any():
            await asyncio.sleep(0.001)
    os.kill(dead.ranks[0].process.pid, signal.SIGKILL)
    kind: type[ReceiveFailed | SendFailed] = ReceiveFailed if victim == "prefill" else SendFailed
    failed = await alive.ranks[0].expect(kind, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)
    assert failed.cause == "peer_lost"
    if victim == "decode":
        prefill.ranks[0].send_as_leader(CloseSend(handoff.ticket_id))
        await prefill.ranks[0].expect(SendClosed, ticket_id=handoff.ticket_id, timeout_s=QUICK_S)


@pytest.mark.parametrize("way", [pytest.param("plain", marks=pytest.mark.soak_only), "tls"])
async def test_a_receiver_that_hangs_is_given_up(make_worker: MakeWorker, authority: Authority, way: str) -> None:
    options: dict[str, object] = {"ttl_s": IDLE_S, "num_blocks": 96, "tls": files_for(way, authority)}
    prefill, decode = await pair(make_worker, LARGE, prefill=options, decode=options)
    await prefill.linked()
    pid = decode.ranks[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        handoff = Handoff.make(prefill, decode, tokens=96 * 16, ttl_s=IDLE_S)
        handoff.open_send()
        handoff.export_cached(0, handoff.kv.blocks)
        await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id, timeout_s=IDLE_S + QUICK_S)
    finally:
        os.kill(pid, signal.SIGCONT)


# --- strangers ----------------------------------------------------------------------------------------------------


async def test_strangers_at_the_data_port_are_dropped_and_the_link_is_made(by_hand: ByHand) -> None:
    sender = await by_hand()
    host, port = split_address(sender.data_address)
    strangers = [socket.create_connection((host, port)) for _ in range(4)]
    silent, wrong, noisy, gone = strangers
    wrong.sendall(secrets.token_bytes(32))
    noisy.sendall(secrets.token_bytes(100_000)[:32])
    gone.close()
    await asyncio.sleep(0.1)
    await sender.connect_data()
    ticket_id, piece = await sender.open(4), sender.piece(4)
    sender.announce(ticket_id, piece)
    sender.send_payload(piece, bytes(piece.payload_bytes))
    assert (await sender.answer()).type is FrameType.ACK
    for stranger in (wrong, noisy):
        stranger.settimeout(QUICK_S)
        assert stranger.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, port))  # the door is closed behind the right one
    for stranger in (silent, wrong, noisy):
        stranger.close()


async def test_certificates_of_another_authority_are_refused(make_worker: MakeWorker, authority: Authority) -> None:
    prefill, _ = await pair(
        make_worker,
        prefill={"tls": files_for("tls", authority, "theirs")},
        decode={"tls": files_for("tls", authority, "ours")},
    )
    report = await prefill.ranks[0].expect(LinkReport, state="refused")
    assert "certificate" in report.reason.lower()


@pytest.mark.parametrize("shows", ["nothing", "another authority's"])
async def test_a_client_without_our_certificate_is_not_answered(
    make_worker: MakeWorker, authority: Authority, shows: str
) -> None:
    ours = authority("ours").issue("worker")
    decode = make_worker("decode-0", transport="tcp", tls=TlsFiles(**ours))
    await decode.attach()
    context = ssl.create_default_context(cafile=ours["ca"])
    context.check_hostname = False
    if shows != "nothing":
        theirs = authority("theirs").issue("worker")
        context.load_cert_chain(theirs["cert"], theirs["key"])

    def knock() -> bytes:
        raw = socket.create_connection(split_address(decode.attached[0].tcp_address), timeout=QUICK_S)
        with context.wrap_socket(raw) as wrapped:
            wrapped.sendall(encode(Welcome("", 0, 0, True)))
            return wrapped.recv(1)

    try:
        assert await asyncio.to_thread(knock) == b""
    except (ssl.SSLError, ConnectionError):
        pass  # how the end shows depends on what was under way


async def test_an_agent_with_tls_answers_nobody_in_plain(make_worker: MakeWorker, authority: Authority) -> None:
    files = files_for("tls", authority)
    prefill, decode = await pair(make_worker, decode={"tls": files})
    report = await prefill.ranks[0].expect(LinkReport, state="down")
    assert report.reason
    trusted = make_worker("prefill-1", connects=True, transport="tcp", tls=files)
    await trusted.attach()
    trusted.set_peers_of(decode)
    decode.set_peers_of(prefill, trusted)
    await trusted.linked()
    await assert_works(trusted, decode)


@pytest.mark.parametrize(("offers", "wants"), [("tcp", "process_group"), ("process_group", "tcp")])
@pytest.mark.slow
async def test_a_link_of_another_kind_than_is_forced_is_refused(
    make_worker: MakeWorker, offers: str, wants: str
) -> None:
    prefill, _ = await pair(make_worker, prefill={"transport": wants}, decode={"transport": offers})
    report = await prefill.ranks[0].expect(LinkReport, state="refused", timeout_s=60.0)
    assert offers in report.reason
    assert wants in report.reason
