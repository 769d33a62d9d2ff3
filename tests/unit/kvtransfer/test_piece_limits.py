"""The receiver's welcome says how large the pieces of a link may be: both ends keep to it, whatever it says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.connection.handshake import XXH3, Hello, LocalRank, Welcome
from kvtransfer.connection.sockets import listen_unix, receive_first, send_first, serve
from kvtransfer.connection.stream import FrameStream
from kvtransfer.control import HOST_DEVICE, AttachPool, DeviceMemory, LinkReport, Peer, WireLayout
from kvtransfer.link import out_link
from kvtransfer.link.in_link import InLink, LinkAcceptor
from kvtransfer.link.out_link import OutLink
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import DevicePool
from kvtransfer.pool.digest import digest_of_bytes
from kvtransfer.pool.piece_copier import Launch, Place
from kvtransfer.pool.pool import make_staging, payload_bytes
from kvtransfer.pool.pools import open_pool
from kvtransfer.pool.staging import Staging
from kvtransfer.session.piece import (
    MAX_DEVICE_PIECE_BYTES,
    MAX_MAPPED_PIECE_BYTES,
    MAX_PIECE_BYTES,
    FrameType,
    Header,
    Piece,
)
from kvtransfer.session.receive import ReceiveSession
from kvtransfer.session.reshard import PlannedLink, reshard_plan
from kvtransfer.testing.pool import make_pool
from kvtransfer.transports.factory import Transports, max_piece_bytes
from kvtransfer.transports.mapped import MappedReceiver, MappedSender
from kvtransfer.transports.protocol import PROBE_BYTES, KvReceiver, KvSender, WelcomeTerms
from kvtransfer.transports.threads import LinkThread
from tandem.kvcache.layout import KvPoolLayout
from tandem.rpc.channel import encode

LAYOUT = KvPoolLayout(num_blocks=1024, layers=2, kv_heads=8, block_tokens=16, head_dim=128, dtype="float32")
BLOCK_BYTES = LAYOUT.block_bytes
LIMIT = 96 << 20  # of a receiver: not any transport's own
(LINK,) = reshard_plan(1, 1, LAYOUT.kv_heads)


class OldWelcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """Of the release before this one."""

    worker_id: str
    epoch: int
    rank: int
    digests: bool
    digest_kind: str = XXH3


@dataclass
class Events:
    """Of both ends."""

    up: asyncio.Future[OutLink] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    accepted: asyncio.Future[InLink] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def link_ready(self, link: OutLink) -> None:
        self.up.set_result(link)

    def link_frame(self, link: OutLink, header: Header, body: bytes) -> None:
        """None is expected."""

    def link_up(self, link: InLink) -> None:
        self.accepted.set_result(link)

    def link_open(self, link: InLink, ticket_id: str, signed: bytes) -> None:
        """None is expected."""

    def link_session(self, link: InLink, ticket_id: str) -> ReceiveSession | None:
        return None

    def has_ticket(self, ticket_id: str) -> bool:
        return False

    def link_written(self, link: InLink, ticket_id: str, piece: Piece, digest: int, verify_s: float) -> None:
        """None is expected."""

    def link_fault(self, link: InLink, ticket_id: str, fault: HandoffFault, *, writing: bool) -> None:
        """None is expected."""

    def link_finish(self, link: InLink, ticket_id: str, pieces: int) -> None:
        """None is expected."""

    def link_abort(self, link: InLink, ticket_id: str) -> None:
        """None is expected."""

    def link_down(self, link: InLink | OutLink, cause: HandoffCause, reason: str, *, final: bool = False) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


class Limited(MappedReceiver):
    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        return (await super().prepare(fds))._replace(max_piece_bytes=LIMIT)


class LimitedTransports(Transports):
    async def receiver(
        self, local: LocalRank, hello: Hello, link: PlannedLink, thread: LinkThread, *, digests: bool
    ) -> KvReceiver:
        return Limited(local, thread, hello, link, digests=digests)


class Never(MappedSender):
    async def establish(self, welcome: Welcome) -> None:
        await asyncio.Event().wait()


class StuckTransports(Transports):
    async def sender(self, kind: str, local: LocalRank, peer: Peer, thread: LinkThread) -> KvSender:
        return Never(local, thread)


class Unused:
    """A copier for links on which no piece is sent."""

    def launch(self, read: Place, write: Place | None, keys: DigestKeys | None) -> Launch:
        raise NotImplementedError

    def release(self, launch: Launch) -> None:
        raise NotImplementedError


def rank_of(worker: str, path: Path, *, on_device: bool = False) -> LocalRank:
    layout = LAYOUT
    fd, _ = make_pool(layout)
    memory = DeviceMemory(HOST_DEVICE, layout.pool_bytes) if on_device else None
    pool = open_pool(layout, memory, [fd], writable=True)
    wire = WireLayout(
        layout.num_blocks, layout.layers, layout.kv_heads, layout.block_tokens, layout.head_dim, layout.dtype
    )
    attach = AttachPool(
        worker, 1, 0, 1, layout.kv_heads, "model", wire, bytes(32), True, "auto", "127.0.0.1", str(path), 10.0,
        memory=memory,
    )  # fmt: skip
    return LocalRank(attach, pool, fd, "host", "machine", Staging(make_staging, layout.block_bytes))


def ignore(report: LinkReport) -> None:
    """These tests need no report."""


@asynccontextmanager
async def opening(
    path: Path,
    events: Events,
    accept: Callable[[socket.socket], Coroutine[None, None, None]],
    transports: Transports | None = None,
    *,
    device: str = "",
) -> AsyncIterator[OutLink]:
    """The sending end, to a receiver that takes connections with `accept`."""
    sender = rank_of("prefill-0", path.with_suffix(".sender"), on_device=bool(device))
    peer = Peer("decode-0", 1, 0, 1, "host", str(path), "", device=device)
    accepting: list[asyncio.Future[None]] = []

    async def take(raw: socket.socket) -> None:
        accepting.append(asyncio.ensure_future(accept(raw)))
        await accepting[-1]

    listening = asyncio.create_task(serve(listen_unix(str(path)), take))
    out = OutLink(sender, peer, LINK, transports or Transports(), events, ignore, asyncio.Semaphore())
    running = asyncio.create_task(out.run())
    try:
        async with asyncio.timeout(30.0):
            yield out
    finally:
        for task in (running, listening):
            task.cancel()
        await asyncio.gather(running, listening, *accepting, return_exceptions=True)
        await asyncio.sleep(0.01)  # closes the connections
        assert sender.pool_fd is not None
        os.close(sender.pool_fd)


def welcoming(answer: bytes) -> Callable[[socket.socket], Coroutine[None, None, None]]:
    """A receiver that answers so, and then to probes."""

    async def accept(raw: socket.socket) -> None:
        with raw:
            _, (pool_fd, probe_fd) = await receive_first(raw)
            probe = os.pread(probe_fd, PROBE_BYTES, 0)
            os.close(pool_fd)
            os.close(probe_fd)
            await send_first(raw, answer, [])
            stream = await FrameStream.over(raw.dup())
        async for header, _ in stream.frames():
            if header.type is FrameType.PROBE:
                stream.send(Header(FrameType.PROBED, digest=digest_of_bytes(probe)))
        stream.close()

    return accept


@pytest.mark.parametrize(
    ("welcomed", "limit"),
    [
        (None, MAX_MAPPED_PIECE_BYTES),
        (LIMIT, LIMIT),
        (MAX_DEVICE_PIECE_BYTES, MAX_DEVICE_PIECE_BYTES),
        (0, MAX_PIECE_BYTES),
        (1, MAX_PIECE_BYTES),
        (-(1 << 40), MAX_PIECE_BYTES),
        (1 << 62, MAX_DEVICE_PIECE_BYTES),
    ],
)
async def test_a_sender_keeps_to_the_welcome_within_what_makes_sense(
    tmp_path: Path, welcomed: int | None, limit: int
) -> None:
    events = Events()
    answer = encode(Welcome("decode-0", 1, 0, True, max_piece_bytes=welcomed))
    async with opening(tmp_path / "link", events, welcoming(answer)):
        assert (await events.up).max_piece_bytes == limit


async def test_a_receiver_of_an_earlier_release_gets_the_pieces_of_its_version(tmp_path: Path) -> None:
    events = Events()
    answer = encode(OldWelcome("decode-0", 1, 0, True))
    assert b"max_piece_bytes" not in answer
    async with opening(tmp_path / "link", events, welcoming(answer)):
        assert (await events.up).max_piece_bytes == MAX_MAPPED_PIECE_BYTES


@pytest.mark.parametrize(("kind", "version"), [("tcp", 2), ("nccl", 2), ("process_group", 1), ("mapped", 1)])
@pytest.mark.parametrize("welcomed", [None, -1, 0, LIMIT])
def test_only_mapped_links_are_told_a_limit(kind: str, version: int, welcomed: int | None) -> None:
    assert max_piece_bytes(kind, version, welcomed) == MAX_PIECE_BYTES


async def test_a_sender_does_not_wait_for_ever_to_establish_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_link, "HANDSHAKE_TIMEOUT_S", 0.2)
    events = Events()
    answer = encode(Welcome("decode-0", 1, 0, True))
    async with opening(tmp_path / "link", events, welcoming(answer), StuckTransports()):
        assert await events.ended == "mapped: the data path was not ready within 0.2 s"


@pytest.mark.parametrize(
    ("size", "reason"),
    [(LIMIT, "piece 0 is for an unknown ticket"), (LIMIT + BLOCK_BYTES, f"expected at most {LIMIT} bytes")],
)
async def test_both_ends_have_the_receivers_limit_and_it_refuses_a_larger_piece(
    tmp_path: Path, size: int, reason: str
) -> None:
    events = Events()
    receiver = rank_of("decode-0", tmp_path / "link")
    acceptor = LinkAcceptor(receiver, LimitedTransports(), events, ignore)
    async with opening(tmp_path / "link", events, acceptor.accept) as out:
        link = await events.accepted
        await events.up
        assert (out.max_piece_bytes, link.max_piece_bytes) == (LIMIT, LIMIT)
        count = size // BLOCK_BYTES
        assert payload_bytes(LAYOUT, count, LAYOUT.block_tokens, LAYOUT.layers, LAYOUT.kv_heads) == size
        piece = Piece(0, 0, count, 0, LAYOUT.layers, 0, LAYOUT.kv_heads, LAYOUT.dtype, LAYOUT.block_tokens, size, 1)
        out.send(Header(FrameType.PIECE, "ab" * 16, piece=piece), bytes(4 * count))
        assert reason in await events.ended
    with contextlib.suppress(OSError):
        os.close(receiver.pool_fd or -1)


@pytest.mark.parametrize(("launches", "limit"), [(True, MAX_DEVICE_PIECE_BYTES), (False, MAX_MAPPED_PIECE_BYTES)])
async def test_a_receiver_that_launches_pieces_welcomes_the_largest(tmp_path: Path, launches: bool, limit: int) -> None:
    events = Events()
    receiver = rank_of("decode-0", tmp_path / "link", on_device=True)
    assert isinstance(receiver.pool, DevicePool)
    receiver.pool._copier = Unused() if launches else None
    acceptor = LinkAcceptor(receiver, Transports(), events, ignore)
    async with opening(tmp_path / "link", events, acceptor.accept, device=HOST_DEVICE) as out:
        link = await events.accepted
        await events.up
        assert (out.max_piece_bytes, link.max_piece_bytes) == (limit, limit)
    with contextlib.suppress(OSError):
        os.close(receiver.pool_fd or -1)
