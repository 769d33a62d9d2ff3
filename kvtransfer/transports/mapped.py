"""Same host, shared memory: the receiver maps the sender's pool read-only and copies announced pieces itself.

The sender passes a read-only descriptor of its pool with the hello. Nothing late can land in the receiver's pool,
because nobody but the receiver writes there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from array import array
from collections import deque
from dataclasses import dataclass, replace

from kvtransfer.causes import protocol_fault
from kvtransfer.digest import copy_and_digest, digest_of, digest_of_bytes
from kvtransfer.handshake import Hello, Own, Welcome, pool_layout
from kvtransfer.piece import FrameType, Header, Piece
from kvtransfer.pool import PoolMap, Span
from kvtransfer.reshard import Link
from kvtransfer.stream import FrameStream
from kvtransfer.transports.protocol import INLINE_BYTES, PROBE_BYTES, LinkThread

DIGESTS_AHEAD = 2  # that wait for the link's thread behind the one it makes: it never idles
_ID_BYTES = 4


class MappedSender:
    def __init__(self, own: Own, thread: LinkThread) -> None:
        self._own = own
        self._thread = thread
        self._probe = secrets.token_bytes(PROBE_BYTES)
        self._digests = True
        self._announcing: deque[asyncio.Task[None]] = deque()

    def hello_fds(self) -> list[int]:
        probe = os.memfd_create("tandem-probe", os.MFD_CLOEXEC)
        os.write(probe, self._probe)
        pool = os.open(f"/proc/self/fd/{self._own.pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
        return [pool, probe]

    async def establish(self, welcome: Welcome) -> None:
        self._digests = welcome.digests

    async def send_probe(self, stream: FrameStream) -> int:
        stream.send(Header(FrameType.PROBE))
        return digest_of_bytes(self._probe)

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: Span) -> None:
        """A large piece is announced when its digest is there; meanwhile the next may be pushed."""
        announcing = self._announce(stream, ticket_id, piece, span)
        if not self._digests or piece.payload_bytes <= INLINE_BYTES:
            await self.settle()
            await announcing
            return
        task = asyncio.create_task(announcing)
        task.add_done_callback(lambda task: _announced(task, stream))
        self._announcing.append(task)
        await self.settle(left=DIGESTS_AHEAD)

    async def settle(self, left: int = 0) -> None:
        while len(self._announcing) > left:
            await self._announcing.popleft()

    async def _announce(self, stream: FrameStream, ticket_id: str, piece: Piece, span: Span) -> None:
        if self._digests:
            piece = replace(piece, digest=await self._thread.run_on(piece.payload_bytes, self.digest, span))
        stream.send(Header(FrameType.PIECE, ticket_id, piece=piece), _pack_ids(span.block_ids))
        await stream.drain()

    def digest(self, span: Span) -> int:
        """In the link's thread."""
        return digest_of(self._own.pool, span)

    def close(self) -> None:
        """The receiver's mapping ends with its link."""


class MappedReceiver:
    places_ahead = True

    def __init__(self, own: Own, thread: LinkThread, hello: Hello, link: Link, *, digests: bool) -> None:
        self._own = own
        self._thread = thread
        self._hello = hello
        self._link = link
        self._digests = digests
        self._source: PoolMap | None = None
        self._probe = b""

    async def prepare(self, fds: list[int]) -> None:
        if len(fds) != 2:
            raise protocol_fault(f"mapped: expected the pool and the probe beside the hello, got {len(fds)} files")
        pool_fd, probe_fd = fds
        self._source = PoolMap.map_fd(pool_layout(self._hello.layout), pool_fd, writable=False)
        self._probe = os.pread(probe_fd, PROBE_BYTES, 0)

    async def establish(self) -> None:
        """The mapping is the data path."""

    async def receive_probe(self) -> int:
        return digest_of_bytes(self._probe)

    async def fetch(self, piece: Piece, body: bytes) -> MappedArrival:
        if self._source is None:
            raise protocol_fault("mapped: a piece came before the hello's pool")
        read = Span(
            unpack_ids(body, piece.block_count),
            piece.last_block_tokens,
            piece.layer_start,
            piece.layer_count,
            self._link.src_head + piece.head_start - self._link.head_start,
            piece.head_count,
        )
        self._source.check(read)
        return MappedArrival(self._own.pool, self._source, read, piece.payload_bytes, self._thread, self._digests)

    def close(self) -> None:
        self._source = None


@dataclass(frozen=True, slots=True)
class MappedArrival:
    own: PoolMap
    source: PoolMap
    read: Span
    size_bytes: int
    thread: LinkThread
    digests: bool

    async def place(self, span: Span) -> int:
        return await self.thread.run_on(self.size_bytes, self._copy, span)

    async def discard(self) -> None:
        """Nothing was read yet."""

    def _copy(self, span: Span) -> int:
        if self.digests:
            return copy_and_digest(self.own, self.source, self.read, span)
        self.own.copy_from(self.source, self.read, span)
        return 0


def _announced(task: asyncio.Task[None], stream: FrameStream) -> None:
    if not task.cancelled() and task.exception() is not None:
        stream.close()  # the link must hear of it, even when nothing else is pushed


def _pack_ids(block_ids: tuple[int, ...]) -> bytes:
    return array("I", block_ids).tobytes()


def unpack_ids(body: bytes, count: int) -> tuple[int, ...]:
    if len(body) != count * _ID_BYTES:
        raise protocol_fault(f"mapped: expected {count} block ids of {_ID_BYTES} bytes, got {len(body)} bytes")
    ids = array("I")
    ids.frombytes(body)
    return tuple(ids)
