"""Between hosts without RDMA, or with encryption: a second connection for the bytes of pieces.

The sender's thread writes directly from its pool, and the receiver's thread reads directly into its blocks. Both hash
the bytes while they are in the CPU's cache. The digest is known only after the bytes were sent, so it follows as a
trailer.

The announcement carries a random number instead of the digest, and the trailer is the digest xor that number. `place`
returns the digest of the received bytes xor the trailer. It equals the announced number only if header, bytes and their
order are intact.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import xxhash

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.data_socket import TOKEN_BYTES, DataListener, DataSocket, connect_data
from kvtransfer.connection.handshake import LocalRank, Welcome
from kvtransfer.connection.sockets import join_address, split_address
from kvtransfer.connection.stream import FrameStream
from kvtransfer.pool.digest import digest_of_bytes
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.pool.quantise import dequantise, quantise
from kvtransfer.session.piece import FrameType, Header, Piece, as_int8
from kvtransfer.transports.batches import BATCH_BYTES, Batch, batches, batches_of
from kvtransfer.transports.protocol import PROBE_BYTES, WelcomeTerms
from kvtransfer.transports.threads import LinkThread

MAX_IDLE_S = 20.0
_TRAILER = struct.Struct("<Q")


class TcpSender:
    def __init__(self, local: LocalRank, thread: LinkThread, peer_address: str, *, int8: bool) -> None:
        self._local = local
        self._thread = thread
        self._host, _ = split_address(peer_address)
        self._int8 = int8
        self._data: DataSocket | None = None
        self._digests = True

    def hello_fds(self) -> list[int]:
        return []

    async def establish(self, welcome: Welcome) -> None:
        if welcome.data_port is None or len(welcome.data_token) != TOKEN_BYTES:
            raise protocol_fault(f"tcp: expected the data port and its token of {TOKEN_BYTES} bytes in the welcome")
        self._digests = welcome.digests
        address = join_address(self._host, welcome.data_port)
        self._data = await connect_data(address, welcome.data_token, self._local.tls, _idle_s(self._local))
        self._data.waiting = self._thread.waiting

    async def send_probe(self, stream: FrameStream) -> int:
        probe = secrets.token_bytes(PROBE_BYTES)
        stream.send(Header(FrameType.PROBE))
        await self._thread.run(_open(self._data).send, [memoryview(probe)])
        return digest_of_bytes(probe)

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        number = secrets.randbits(64) if self._digests else None
        size, layout = piece.payload_bytes, self._local.layout
        wire = as_int8(piece, layout) if self._int8 else piece
        header = Header(FrameType.PIECE, ticket_id, piece=replace(wire, digest=number))
        announce = partial(asyncio.get_running_loop().call_soon_threadsafe, stream.send, header)
        await self._thread.run(self._send, _open(self._data), span, size, number, announce)

    def _send(
        self, data: DataSocket, span: PoolSpan, size: int, number: int | None, announce: Callable[[], object]
    ) -> None:
        hasher, staging = xxhash.xxh3_64(), self._local.staging
        with self._local.pool.on_host(span, staging, write=False, scratch_bytes=BATCH_BYTES) as (pool, read, scratch):
            announce()
            source = batches_of(quantise(pool.pack(read, size), pool.layout)) if self._int8 else None
            for batch in source or batches(pool, read, scratch):
                batch.gather()
                if number is not None:
                    for view in batch.views:
                        hasher.update(view)
                data.send(batch.views)
        if number is not None:
            data.send([memoryview(_TRAILER.pack(hasher.intdigest() ^ number))])

    async def settle(self) -> None:
        """Does nothing: `push` announces at once."""

    def close(self) -> None:
        """Closes the data connection, which ends the thread's current operation."""
        if self._data is not None:
            self._data.close()
            self._data = None


class TcpReceiver:
    places_ahead = False

    def __init__(self, local: LocalRank, thread: LinkThread, *, digests: bool, int8: bool) -> None:
        self._local = local
        self._thread = thread
        self._digests = digests
        self._int8 = int8
        self._listener: DataListener | None = None
        self._data: DataSocket | None = None

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        if fds:
            raise protocol_fault("tcp: expected no descriptors with the hello")
        try:
            self._listener = DataListener(self._local.attach.bind_host, self._local.tls)
        except OSError as error:
            what = f"tcp: cannot listen on {self._local.attach.bind_host}: {error}"
            raise HandoffFault(HandoffCause.TRANSPORT, what) from error
        return WelcomeTerms(self._listener.port, self._listener.token)

    async def establish(self) -> None:
        if self._listener is None:
            raise protocol_fault("tcp: no data port was prepared")
        self._data = await self._listener.admit(_idle_s(self._local))
        self._data.waiting = self._thread.waiting

    async def receive_probe(self) -> int:
        probe = bytearray(PROBE_BYTES)
        await self._thread.run(_open(self._data).receive, [memoryview(probe)])
        return digest_of_bytes(bytes(probe))

    async def fetch(self, piece: Piece, body: bytes) -> TcpArrival:
        if body:
            raise protocol_fault("tcp: expected a piece without a body")
        if (piece.digest is not None) != self._digests:
            raise protocol_fault("tcp: expected digests as agreed in the welcome")
        int8_bytes = piece.payload_bytes if self._int8 else None
        transfer = _TcpTransfer(_open(self._data), self._local, self._digests, int8_bytes)
        return TcpArrival(transfer, self._thread, piece.payload_bytes)

    def close(self) -> None:
        """Closes the data connection, after which no byte is written."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._data is not None:
            self._data.close()
            self._data = None


@dataclass(frozen=True, slots=True)
class TcpArrival:
    """An announced piece. Its bytes are in transit and must be received, even if the piece is not used."""

    digest_follows = False  # it follows the bytes instead of in a frame

    transfer: _TcpTransfer
    thread: LinkThread
    size_bytes: int

    async def place(self, span: PoolSpan) -> int:
        await self.transfer.data.readable()
        return await self.thread.run(self.transfer.write, span)

    async def discard(self) -> None:
        await self.thread.run(self.transfer.skip, self.size_bytes)


@dataclass(frozen=True, slots=True)
class _TcpTransfer:
    """The transfer of one piece, in the link's thread."""

    data: DataSocket
    local: LocalRank
    digests: bool
    int8_bytes: int | None  # the piece's size on a link that carries int8

    def write(self, span: PoolSpan) -> int:
        local = self.local
        with local.pool.on_host(span, local.staging, write=True, scratch_bytes=BATCH_BYTES) as (pool, written, scratch):
            if self.int8_bytes is None:
                return self._receive(batches(pool, written, scratch))
            wire = np.empty(self.int8_bytes, np.uint8)
            digest = self._receive(batches_of(wire))
            pool.unpack(dequantise(wire, pool.layout), written)
            return digest

    def _receive(self, into: Iterator[Batch]) -> int:
        hasher = xxhash.xxh3_64()
        for batch in into:
            self.data.receive(batch.views)
            if self.digests:
                for view in batch.views:
                    hasher.update(view)
            batch.scatter()
        return int(hasher.intdigest()) ^ self._trailer() if self.digests else 0

    def skip(self, size: int) -> None:
        with self.local.staging.lease(BATCH_BYTES, receives=True) as scratch:
            while size:
                step = min(size, BATCH_BYTES)
                self.data.receive([scratch[:step].data])
                size -= step
        if self.digests:
            self._trailer()

    def _trailer(self) -> int:
        raw = bytearray(_TRAILER.size)
        self.data.receive([memoryview(raw)])
        return int(_TRAILER.unpack(raw)[0])


def _idle_s(local: LocalRank) -> float:
    return min(local.attach.ticket_ttl_s, MAX_IDLE_S)


def _open(data: DataSocket | None) -> DataSocket:
    if data is None:
        raise HandoffFault(HandoffCause.TRANSPORT, "tcp: the link is closed")
    return data
