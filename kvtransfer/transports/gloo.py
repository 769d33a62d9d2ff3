"""`process_group`: gloo between hosts, on host memory.

A piece is sent in canonical order as messages of `MESSAGE_BYTES`. The receiver gets them in staging, so that the
library's late writes are harmless; the sender packs them there, or sends them from the pool where their bytes are
contiguous. While one message is in transit, the next is packed and the previous one unpacked.

The digest is computed while packing, so it follows the bytes at the end of the last message. The announcement carries a
random number instead, and the trailer is the digest xor that number (as in `tcp`). In version 1 a piece is one message
with the digest in the announcement.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvtransfer.causes import protocol_fault
from kvtransfer.connection.handshake import LocalRank, Welcome
from kvtransfer.connection.stream import FrameStream
from kvtransfer.pool.digest import Digest, digest_of, digest_of_bytes, start_digest
from kvtransfer.pool.pool import Bytes, Cursor, PoolMap, PoolSpan
from kvtransfer.pool.quantise import dequantise, quantise
from kvtransfer.session.piece import FrameType, Header, Piece, as_int8
from kvtransfer.transports.process_group import Group, GroupReceiver, GroupSender, MessageArrival, Work, joined
from kvtransfer.transports.protocol import PROBE_BYTES
from kvtransfer.transports.threads import LinkThread
from kvtransfer.versions import stripes_groups

MESSAGE_BYTES = 4 << 20
_BUFFERS = 3
_TRAILER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Format:
    """How a piece is divided into messages. `follows`: its digest follows its bytes."""

    payload_bytes: int
    message_bytes: int
    follows: bool

    @classmethod
    def of(cls, payload_bytes: int, version: int, *, digests: bool) -> Format:
        striped = stripes_groups(version)
        return cls(payload_bytes, MESSAGE_BYTES if striped else payload_bytes, digests and striped)

    @property
    def buffer_bytes(self) -> int:
        return max(MESSAGE_BYTES, self.message_bytes) + _TRAILER.size

    def messages(self) -> Iterator[tuple[int, int]]:
        """Sizes of each message's payload and of the whole message."""
        for start in range(0, self.payload_bytes, self.message_bytes):
            size = min(self.message_bytes, self.payload_bytes - start)
            is_last = start + size == self.payload_bytes
            yield size, size + (_TRAILER.size if is_last and self.follows else 0)


class GlooSender(GroupSender):
    def __init__(self, local: LocalRank, thread: LinkThread, peer_address: str, *, int8: bool) -> None:
        super().__init__(local, thread, peer_address, torch.device("cpu"))
        self._int8 = int8
        self._digests = True

    async def establish(self, welcome: Welcome) -> None:
        self._digests = welcome.digests
        await super().establish(welcome)

    async def send_probe(self, stream: FrameStream) -> int:
        probe = bytearray(secrets.token_bytes(PROBE_BYTES))
        stream.send(Header(FrameType.PROBE))
        group = joined(self._group)
        await self._thread.run(lambda: group.wait(group.send(torch.frombuffer(probe, dtype=torch.uint8))))
        return digest_of_bytes(memoryview(probe))

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        wire = as_int8(piece, self._local.layout) if self._int8 else piece
        form = Format.of(wire.payload_bytes, stream.version, digests=self._digests)
        number: int | None = None
        if form.follows:
            number = secrets.randbits(8 * _TRAILER.size)
        elif self._digests:
            number = await self._thread.run(self._digest, span)
        header = Header(FrameType.PIECE, ticket_id, piece=replace(wire, digest=number))
        announce = partial(asyncio.get_running_loop().call_soon_threadsafe, stream.send, header)
        await self._thread.run(self._send, joined(self._group), piece.payload_bytes, span, form, number, announce)

    def _digest(self, span: PoolSpan) -> int:
        with self._local.pool.on_host(span, self._local.staging, write=False) as (pool, read, _):
            return digest_of(pool, read)

    def _send(
        self,
        group: Group,
        size_in_pool: int,
        span: PoolSpan,
        form: Format,
        number: int | None,
        announce: Callable[[], object],
    ) -> None:
        """Returns when all messages have been sent, after which the staging and the pool are no longer read."""
        local, int8 = self._local, self._int8
        digest = start_digest(form.payload_bytes, grain_bytes(local, int8=int8)) if form.follows else None
        buffers_bytes = _BUFFERS * form.buffer_bytes
        with local.pool.on_host(span, local.staging, write=False, scratch_bytes=buffers_bytes) as (pool, read, staging):
            announce()
            cursor = Cursor([quantise(pool.pack(read, size_in_pool), pool.layout)]) if int8 else pool.cursor(read)
            buffers = staging.reshape(_BUFFERS, form.buffer_bytes)
            works: list[Work] = []
            sent: list[Tensor] = []  # the library keeps no reference
            for turn, (payload, size) in enumerate(form.messages()):
                if turn >= _BUFFERS:
                    group.wait(works[turn - _BUFFERS])
                message = cursor.contiguous(payload, digest) if size == payload else None
                if message is None:
                    message = buffers[turn % _BUFFERS, :size]
                    cursor.read(message[:payload], digest)
                    if digest is not None and number is not None and size > payload:
                        _TRAILER.pack_into(message.data, payload, digest.value() ^ number)
                sent.append(as_tensor(message))
                works.append(group.send(sent[-1]))
            for work in works[-_BUFFERS:]:
                group.wait(work)


class GlooReceiver(GroupReceiver):
    """`version` is the protocol version in the hello."""

    def __init__(self, local: LocalRank, thread: LinkThread, *, digests: bool, int8: bool, version: int) -> None:
        super().__init__(local, thread, torch.device("cpu"))
        self._int8 = int8
        self._version = version
        self._digests = digests

    async def receive_probe(self) -> int:
        return await self._thread.run(self._receive_probe, joined(self._group))

    def _receive_probe(self, group: Group) -> int:
        with self._local.staging.lease(MESSAGE_BYTES, receives=True) as buffer:
            group.wait(group.receive(as_tensor(buffer)))
            return digest_of_bytes(buffer[:PROBE_BYTES].data)

    async def fetch(self, piece: Piece, body: bytes) -> MessageArrival:
        if body:
            raise protocol_fault("process_group: expected a piece without a body")
        if (piece.digest is not None) != self._digests:
            raise protocol_fault("process_group: expected digests as agreed in the welcome")
        form = Format.of(piece.payload_bytes, self._version, digests=self._digests)
        digest = start_digest(form.payload_bytes, grain_bytes(self._local, int8=self._int8)) if self._digests else None
        transfer = _GlooTransfer(joined(self._group), self._local, form, digest, self._int8)
        return MessageArrival(transfer, self._thread)


@dataclass(frozen=True, slots=True)
class _GlooTransfer:
    """The transfer of one piece, in the link's thread."""

    group: Group
    local: LocalRank
    form: Format
    digest: Digest | None
    int8: bool

    def write(self, span: PoolSpan) -> int:
        local, size = self.local, _BUFFERS * self.form.buffer_bytes
        with local.pool.on_host(span, local.staging, write=True, scratch_bytes=size) as (pool, written, staging):
            return self._write(pool, written, staging)

    def _write(self, pool: PoolMap, span: PoolSpan, staging: Bytes) -> int:
        wire = np.empty(self.form.payload_bytes if self.int8 else 0, np.uint8)
        cursor = Cursor([wire]) if self.int8 else pool.cursor(span)
        followed = 0
        for message, payload in self._messages(staging):
            cursor.write(message[:payload], self.digest)
            if message.size > payload:
                (followed,) = _TRAILER.unpack_from(message.data, payload)
        if self.int8:
            pool.unpack(dequantise(wire, pool.layout), span)
        return 0 if self.digest is None else self.digest.value() ^ followed

    def skip(self) -> None:
        with self.local.staging.lease(_BUFFERS * self.form.buffer_bytes, receives=True) as staging:
            for _ in self._messages(staging):
                pass

    def _messages(self, staging: Bytes) -> Iterator[tuple[Bytes, int]]:
        """Messages and their payload sizes. The next ones are received while one is processed."""
        sizes = list(self.form.messages())
        buffers = staging.reshape(_BUFFERS, self.form.buffer_bytes)
        works: list[Work] = []
        try:
            for turn, (payload, size) in enumerate(sizes):
                while len(works) < min(len(sizes), turn + _BUFFERS):
                    works.append(self.group.receive(as_tensor(buffers[len(works) % _BUFFERS])))
                self.group.wait(works[turn])
                yield buffers[turn % _BUFFERS, :size], payload
        except BaseException:
            works.clear()
            self.group.destroy()  # before another link gets the staging
            raise


def grain_bytes(local: LocalRank, *, int8: bool) -> int:
    """A common divisor of the sizes of a piece's contiguous parts; 1 if quantised."""
    return 1 if int8 else local.layout.token_bytes


def as_tensor(data: Bytes) -> Tensor:
    return torch.from_numpy(data)
