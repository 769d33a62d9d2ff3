"""Within a host: the receiver maps the sender's pool and copies announced pieces itself.

In host memory, the sender passes a read-only descriptor of its pool with the hello. In GPU memory, the hello contains
the pool's CUDA IPC handle, and the device computes copies and digests, with a key that the receiver chose for this
link. Only the receiver writes to its pool, so no late write can occur.

A large piece is announced at once, with a random number in place of its digest, and copied while the sender computes
the digest. The digest xor that number follows in a separate frame. On a GPU, several pieces are under way at once.

Pieces need no event between processes. The engine waits for its stream before it reports a layer (ModelRunner), so a
piece is in memory when it is announced. The receiver waits for its own stream before it acknowledges.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from array import array
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvtransfer.causes import protocol_fault
from kvtransfer.connection.handshake import KEY_BITS, MULTILINEAR, XXH3, Hello, LocalRank, Welcome, pool_layout
from kvtransfer.connection.stream import FrameStream
from kvtransfer.pool.digest import copy_and_digest, digest_of, digest_of_bytes
from kvtransfer.pool.pool import PoolMap, PoolSpan, check_span
from kvtransfer.pool.pools import Pool, open_pool
from kvtransfer.session.piece import MAX_DEVICE_PIECE_BYTES, FrameType, Header, Piece
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.pending import AT_ONCE, PendingQueue
from kvtransfer.transports.protocol import PROBE_BYTES, WelcomeTerms
from kvtransfer.transports.threads import INLINE_BYTES, LinkThread
from kvtransfer.versions import mapped_digests_follow

if TYPE_CHECKING:
    from kvtransfer.pool.device_digest import DigestKeys
    from kvtransfer.pool.device_pool import DevicePool

log = logging.getLogger(__name__)

T = TypeVar("T")
DIGESTS_AHEAD = 2  # digests queued for the link's thread, to keep it busy
KERNELS_WAIT_S = 20.0  # for their first compilation, at both ends; together within a link's handshake
_DIGEST_BITS = 64
_ID_BYTES = 4


class PoolAccess(Protocol):
    """Access of one link to the pools at both ends, in host or device memory."""

    max_piece_bytes: int | None  # of pieces to copy; None: as for any `mapped` link of the version

    async def digest(self, span: PoolSpan, size_bytes: int) -> int:
        """The digest of a span of the local pool. `size_bytes`: the piece's."""
        ...

    async def copy(self, read: PoolSpan, write: PoolSpan, size_bytes: int, *, digests: bool) -> int:
        """Copies a piece from the peer's pool to the local one. Returns its digest if `digests`."""
        ...


class HostAccess:
    max_piece_bytes: int | None = None

    def __init__(self, thread: LinkThread, local: PoolMap, source: PoolMap | None = None) -> None:
        self._thread = thread
        self._local = local
        self._source = source

    async def digest(self, span: PoolSpan, size_bytes: int) -> int:
        return await self._thread.run_on(size_bytes, digest_of, self._local, span)

    async def copy(self, read: PoolSpan, write: PoolSpan, size_bytes: int, *, digests: bool) -> int:
        return await self._thread.run_on(size_bytes, self._copy, read, write, digests)

    def _copy(self, read: PoolSpan, write: PoolSpan, digests: bool) -> int:
        source = _required(self._source)
        if digests:
            return copy_and_digest(self._local, source, read, write)
        self._local.copy_from(source, read, write)
        return 0


class DeviceAccess:
    """Small pieces take the link's thread too: a hung device blocks only that, not the agent."""

    def __init__(
        self, thread: LinkThread, local: DevicePool, keys: DigestKeys, source: DevicePool | None = None
    ) -> None:
        is_one_launch = local.launches_from(source)
        self.max_piece_bytes = MAX_DEVICE_PIECE_BYTES if is_one_launch else None
        # Torch's operations end before the next can start, so each is reported before the next.
        self._queue = PendingQueue(thread, AT_ONCE if is_one_launch else 1)
        self._local = local
        self._keys = keys
        self._source = source

    async def digest(self, span: PoolSpan, size_bytes: int) -> int:
        return await self._queue.run(lambda: self._local.start_digest(span, self._keys))

    async def copy(self, read: PoolSpan, write: PoolSpan, size_bytes: int, *, digests: bool) -> int:
        source, keys = _required(self._source), self._keys if digests else None
        return await self._queue.run(lambda: self._local.start_copy(source, read, write, keys))


def make_access(
    thread: LinkThread, local: Pool, source: Pool | None, kind: str, key: int, *, wait_s: float = KERNELS_WAIT_S
) -> PoolAccess:
    """Call it in the link's thread. Raises HandoffFault (protocol) if the local pool cannot have such digests."""
    if isinstance(local, PoolMap):
        if kind != XXH3 or not (source is None or isinstance(source, PoolMap)):
            raise protocol_fault(f"mapped: expected a pool in host memory with {XXH3} digests, got {kind}")
        return HostAccess(thread, local, source)
    if kind != MULTILINEAR or isinstance(source, PoolMap) or not 0 <= key < 1 << KEY_BITS:
        raise protocol_fault(f"mapped: expected a pool in device memory with {MULTILINEAR} digests, got {kind}")
    if source is not None:
        local.try_reading(source)
    with thread.waiting():
        if not local.await_kernels(wait_s):
            log.warning("a link does not wait longer for the kernels of pieces: it begins with torch's operations")
    return DeviceAccess(thread, local, local.make_keys(key), source)


class MappedSender:
    digests_follow = True  # of large pieces, if the receiver's version supports it

    def __init__(self, local: LocalRank, thread: LinkThread) -> None:
        self._local = local
        self._thread = thread
        self._probe = secrets.token_bytes(PROBE_BYTES)
        self._digests = True
        self._pending_digests: deque[asyncio.Task[None]] = deque()
        self._access: PoolAccess | None = None

    def hello_fds(self) -> list[int]:
        probe = os.memfd_create("tandem-probe", os.MFD_CLOEXEC)
        os.write(probe, self._probe)
        if self._local.pool_fd is None:
            return [probe]
        return [os.open(f"/proc/self/fd/{self._local.pool_fd}", os.O_RDONLY | os.O_CLOEXEC), probe]

    async def establish(self, welcome: Welcome) -> None:
        self._digests = welcome.digests
        kind, key = welcome.digest_kind, welcome.digest_key
        self._access = await self._thread.run(make_access, self._thread, self._local.pool, None, kind, key)

    async def send_probe(self, stream: FrameStream) -> int:
        stream.send(Header(FrameType.PROBE))
        return digest_of_bytes(self._probe)

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        """The digest of a large piece may follow later."""
        follows = self._digests and self.digests_follow and _digest_follows(stream.version, piece)
        if follows:
            piece = replace(piece, digest=secrets.randbits(_DIGEST_BITS))
        elif self._digests:
            piece = replace(piece, digest=await self._digest(piece, span))
        stream.send(Header(FrameType.PIECE, ticket_id, piece=piece), _pack_ids(span.block_ids))
        if follows:
            task = asyncio.create_task(self._follow(stream, ticket_id, piece, span))
            task.add_done_callback(lambda task: _followed(task, stream))
            self._pending_digests.append(task)
        await stream.drain()
        await self.settle(left=DIGESTS_AHEAD)

    async def settle(self, left: int = 0) -> None:
        while len(self._pending_digests) > left:
            await self._pending_digests.popleft()

    async def _follow(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        value = await self._digest(piece, span) ^ _required(piece.digest)
        stream.send(Header(FrameType.DIGEST, ticket_id, piece.seq, digest=value))

    async def _digest(self, piece: Piece, span: PoolSpan) -> int:
        return await _required(self._access).digest(span, piece.payload_bytes)

    def close(self) -> None:
        """Does nothing: the receiver's mapping ends with its link."""


class MappedReceiver:
    places_ahead = True

    def __init__(self, local: LocalRank, thread: LinkThread, hello: Hello, link: PlannedLink, *, digests: bool) -> None:
        self._local = local
        self._thread = thread
        self._hello = hello
        self._layout = pool_layout(hello.layout)
        self._link = link
        self._digests = digests
        self._access: PoolAccess | None = None
        self._probe = b""

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        if not fds:
            raise protocol_fault("mapped: expected the probe's descriptor with the hello, got none")
        *pool_fds, probe_fd = fds
        memory, kinds = self._hello.memory, self._hello.digest_kinds
        kind, key = (MULTILINEAR, secrets.randbits(KEY_BITS)) if self._local.device else (XXH3, 0)
        if kind not in kinds:
            raise protocol_fault(f"mapped: expected digests of kind {kind} for the pool's memory, got {kinds}")

        def access() -> PoolAccess:
            source = open_pool(self._layout, memory, pool_fds, writable=False)
            return make_access(self._thread, self._local.pool, source, kind, key)

        self._access = await self._thread.run(access)
        self._probe = os.pread(probe_fd, PROBE_BYTES, 0)
        return WelcomeTerms(digest_kind=kind, digest_key=key, max_piece_bytes=self._access.max_piece_bytes)

    async def establish(self) -> None:
        """Does nothing: the mapping is the data path."""

    async def receive_probe(self) -> int:
        return digest_of_bytes(self._probe)

    async def fetch(self, piece: Piece, body: bytes) -> MappedArrival:
        read = PoolSpan(
            unpack_ids(body, piece.block_count),
            piece.last_block_tokens,
            piece.layer_start,
            piece.layer_count,
            self._link.src_head + piece.head_start - self._link.head_start,
            piece.head_count,
        )
        check_span(self._layout, read)
        follows = self._digests and _digest_follows(self._hello.protocol, piece)
        return MappedArrival(_required(self._access), read, piece.payload_bytes, self._digests, follows)

    def close(self) -> None:
        self._access = None


@dataclass(frozen=True, slots=True)
class MappedArrival:
    access: PoolAccess
    read: PoolSpan
    size_bytes: int
    digests: bool
    digest_follows: bool

    async def place(self, span: PoolSpan) -> int:
        return await self.access.copy(self.read, span, self.size_bytes, digests=self.digests)

    async def discard(self) -> None:
        """Does nothing: no byte was read."""


def _required(part: T | None) -> T:
    if part is None:
        raise protocol_fault("mapped: a piece arrived before the peer's pool was mapped")
    return part


def _digest_follows(version: int, piece: Piece) -> bool:
    return piece.payload_bytes > INLINE_BYTES and mapped_digests_follow(version)


def _followed(task: asyncio.Task[None], stream: FrameStream) -> None:
    if not task.cancelled() and task.exception() is not None:
        stream.close()  # ends the link even if nothing else is pushed


def _pack_ids(block_ids: tuple[int, ...]) -> bytes:
    return array("I", block_ids).tobytes()


def unpack_ids(body: bytes, count: int) -> tuple[int, ...]:
    if len(body) != count * _ID_BYTES:
        raise protocol_fault(f"mapped: expected {count} block ids of {_ID_BYTES} bytes, got {len(body)} bytes")
    ids = array("I")
    ids.frombytes(body)
    return tuple(ids)
