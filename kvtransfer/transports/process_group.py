"""Between hosts: a two-rank torch.distributed group per link, with its own store. `gloo` on CPU, `nccl` on CUDA.

The receiver creates the store on a pre-bound port of its interface and sends the port in the welcome. A piece is sent
in canonical order as messages of `MESSAGE_BYTES` through a few buffers at each end: while one message is in transit,
the next is packed and the previous one unpacked. The library never gets an address in a pool, so its late operations
are harmless. A dead peer raises an error at once, a silent one after the timeout, in the link's thread only.

The digest is computed while packing, so it follows the bytes at the end of the last message. The announcement carries a
random number instead, and the trailer is the digest xor that number (as in `tcp`). In version 1 a piece is one message
with the digest in the announcement.
"""

from __future__ import annotations

import datetime
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.handshake import LocalRank, Welcome
from kvtransfer.connection.sockets import listen_tcp, split_address
from kvtransfer.connection.stream import FrameStream
from kvtransfer.pool.digest import Digest, digest_of, digest_of_bytes, start_digest
from kvtransfer.pool.pool import Bytes, Cursor, PoolMap, PoolSpan, make_staging
from kvtransfer.pool.pools import Pool
from kvtransfer.pool.quantise import dequantise, quantise
from kvtransfer.session.piece import FrameType, Header, Piece, as_int8
from kvtransfer.transports.protocol import PROBE_BYTES, STALL_S, LinkThread, WelcomeTerms
from kvtransfer.versions import stripes_groups

TIMEOUT = datetime.timedelta(seconds=20)  # for the rendezvous
MESSAGE_BYTES = 4 << 20
PIECE_TIMEOUT = datetime.timedelta(seconds=0.9 * STALL_S)  # because gloo's abort wakes no waiter
_RECEIVER, _SENDER = 0, 1
_BUFFERS = 4
_TRAILER = struct.Struct("<Q")


class _Work(Protocol):
    def wait(self, timeout: datetime.timedelta) -> bool: ...


class _TorchGroup(Protocol):
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Operation:
    """A message in transit. The library uses `tensor`, on CPU the same memory as `data`, until `wait` returns."""

    data: Bytes
    tensor: torch.Tensor
    work: _Work

    def wait(self) -> Bytes:
        """Blocks until done. Returns the data."""
        with _library_errors():
            self.work.wait(PIECE_TIMEOUT)
            if self.tensor.device.type != "cpu":
                torch.from_numpy(self.data).copy_(self.tensor)
        return self.data


class Group:
    """The two-rank group. All methods run in the link's thread."""

    def __init__(self, store: TCPStore, rank: int, bind_host: str, device: torch.device) -> None:
        self._peer = 1 - rank
        self._device = device
        backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        options = backend.Options() if device.type == "cuda" else backend._Options()
        options._timeout = TIMEOUT
        if device.type != "cuda":
            options._devices = [backend.create_device(hostname=bind_host)]
        self._group: _TorchGroup = backend(PrefixStore("link", store), rank, 2, options)

    def send(self, data: Bytes) -> Operation:
        with _library_errors():
            tensor = torch.from_numpy(data).to(self._device)
            return Operation(data, tensor, self._group.send([tensor], self._peer, 0))

    def receive(self, buffer: Bytes, size: int) -> Operation:
        """Receives a message of `size` bytes.

        gloo accepts shorter messages, but aborts the process on one longer than the buffer. So it gets the whole
        buffer, and the digest detects a faulty peer's data.
        """
        with _library_errors():
            tensor = torch.from_numpy(buffer if self._device.type == "cpu" else buffer[:size]).to(self._device)
            return Operation(buffer[:size], tensor, self._group.recv([tensor], self._peer, 0))

    def abort(self) -> None:
        self._group.abort()


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

    def messages(self) -> Iterator[tuple[int, int]]:
        """Sizes of each message's payload and of the whole message."""
        for start in range(0, self.payload_bytes, self.message_bytes):
            size = min(self.message_bytes, self.payload_bytes - start)
            is_last = start + size == self.payload_bytes
            yield size, size + (_TRAILER.size if is_last and self.follows else 0)


class Buffers:
    """A ring of message buffers. `next` waits for a buffer's previous operation before it reuses the buffer."""

    def __init__(self) -> None:
        self._buffers = [np.empty(0, np.uint8) for _ in range(_BUFFERS)]
        self._operations: list[Operation | None] = [None] * _BUFFERS
        self._turn = 0

    def next(self, size: int) -> Bytes:
        """A buffer of at least `size` bytes."""
        self._turn = (self._turn + 1) % _BUFFERS
        if (operation := self._operations[self._turn]) is not None:
            self._operations[self._turn] = None
            operation.wait()
        if self._buffers[self._turn].size < size:
            self._buffers[self._turn] = make_staging(max(size, MESSAGE_BYTES + _TRAILER.size))
        return self._buffers[self._turn]

    def in_use(self, operation: Operation) -> None:
        """Registers the operation that uses the buffer from the last `next`."""
        self._operations[self._turn] = operation


class GroupSender:
    def __init__(self, local: LocalRank, thread: LinkThread, peer_address: str, device: str, *, int8: bool) -> None:
        self._local = local
        self._thread = thread
        self._host, _ = split_address(peer_address)
        self._device = torch.device(device)
        self._int8 = int8
        self._grain_bytes = _grain_bytes(local, int8=int8)
        self._group: Group | None = None
        self._digests = True
        self._buffers = Buffers()

    def hello_fds(self) -> list[int]:
        return []

    async def establish(self, welcome: Welcome) -> None:
        if welcome.data_port is None:
            raise protocol_fault("process_group: expected the store's port in the welcome")
        self._digests = welcome.digests
        self._group = await self._thread.run(self._join, welcome.data_port)

    def _join(self, port: int) -> Group:
        try:
            store = TCPStore(self._host, port, None, False, TIMEOUT, False)
            return Group(store, _SENDER, self._local.attach.bind_host, self._device)
        except (RuntimeError, ValueError) as error:
            raise _broken(error) from error

    async def send_probe(self, stream: FrameStream) -> int:
        probe = _as_array(bytearray(secrets.token_bytes(PROBE_BYTES)))
        stream.send(Header(FrameType.PROBE))
        await self._thread.run(self._send_probe, _joined(self._group), probe)
        return digest_of_bytes(probe.data)

    def _send_probe(self, group: Group, data: Bytes) -> None:
        group.send(data).wait()

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        """Returns when the last messages are in our buffers; they may still be in transit."""
        wire = as_int8(piece, self._local.layout) if self._int8 else piece
        form = Format.of(wire.payload_bytes, stream.version, digests=self._digests)
        number: int | None = None
        if form.follows:
            number = secrets.randbits(8 * _TRAILER.size)
        elif self._digests:
            number = await self._thread.run(self._digest, span)
        stream.send(Header(FrameType.PIECE, ticket_id, piece=replace(wire, digest=number)))
        await self._thread.run(self._send, _joined(self._group), piece.payload_bytes, span, form, number)

    def _digest(self, span: PoolSpan) -> int:
        with self._local.pool.on_host(span, write=False) as (pool, read):
            return digest_of(pool, read)

    def _send(self, group: Group, size_in_pool: int, span: PoolSpan, form: Format, number: int | None) -> None:
        digest = start_digest(form.payload_bytes, self._grain_bytes) if form.follows else None
        with self._local.pool.on_host(span, write=False) as (pool, read):
            cursor = Cursor([quantise(pool.pack(read, size_in_pool), pool.layout)]) if self._int8 else pool.cursor(read)
            for payload, size in form.messages():
                message = self._buffers.next(size)[:size]
                cursor.read(message[:payload], digest)
                if digest is not None and number is not None and size > payload:
                    _TRAILER.pack_into(message.data, payload, digest.value() ^ number)
                self._buffers.in_use(group.send(message))

    async def settle(self) -> None:
        """Does nothing: `push` announces at once."""

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


class GroupReceiver:
    """`version` is the protocol version in the hello."""

    places_ahead = False

    def __init__(
        self, local: LocalRank, thread: LinkThread, device: str, *, digests: bool, int8: bool, version: int
    ) -> None:
        self._local = local
        self._thread = thread
        self._int8 = int8
        self._version = version
        self._buffers = Buffers()
        self._device = torch.device(device)
        self._digests = digests
        self._store: TCPStore | None = None
        self._group: Group | None = None

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        if fds:
            raise protocol_fault("process_group: expected no descriptors with the hello")
        listener = listen_tcp(self._local.attach.bind_host)
        port = int(listener.getsockname()[1])
        self._store = await self._thread.run(self._make_store, listener, port)
        return WelcomeTerms(port)

    def _make_store(self, listener: socket.socket, port: int) -> TCPStore:
        host = self._local.attach.bind_host
        try:
            return TCPStore(host, port, None, True, TIMEOUT, False, master_listen_fd=listener.detach())
        except (RuntimeError, ValueError) as error:
            raise _broken(error) from error

    async def establish(self) -> None:
        self._group = await self._thread.run(self._join)

    def _join(self) -> Group:
        if self._store is None:
            raise protocol_fault("process_group: no store was prepared")
        try:
            return Group(self._store, _RECEIVER, self._local.attach.bind_host, self._device)
        except RuntimeError as error:
            raise _broken(error) from error

    async def receive_probe(self) -> int:
        return await self._thread.run(self._receive_probe, _joined(self._group))

    def _receive_probe(self, group: Group) -> int:
        return digest_of_bytes(group.receive(self._buffers.next(PROBE_BYTES), PROBE_BYTES).wait().data)

    async def fetch(self, piece: Piece, body: bytes) -> GroupArrival:
        if body:
            raise protocol_fault("process_group: expected a piece without a body")
        if (piece.digest is not None) != self._digests:
            raise protocol_fault("process_group: expected digests as agreed in the welcome")
        form = Format.of(piece.payload_bytes, self._version, digests=self._digests)
        digest = start_digest(form.payload_bytes, _grain_bytes(self._local, int8=self._int8)) if self._digests else None
        transfer = _GroupTransfer(_joined(self._group), self._local.pool, self._buffers, form, digest, self._int8)
        return GroupArrival(transfer, self._thread)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._store = None


@dataclass(frozen=True, slots=True)
class GroupArrival:
    """An announced piece. Its messages are in transit and must be received, even if the piece is not used."""

    digest_follows = False  # it follows the bytes instead of in a frame

    transfer: _GroupTransfer
    thread: LinkThread

    async def place(self, span: PoolSpan) -> int:
        return await self.thread.run(self.transfer.write, span)

    async def discard(self) -> None:
        await self.thread.run(self.transfer.skip)


@dataclass(frozen=True, slots=True)
class _GroupTransfer:
    """The transfer of one piece, in the link's thread."""

    group: Group
    pool: Pool
    buffers: Buffers
    form: Format
    digest: Digest | None
    int8: bool

    def write(self, span: PoolSpan) -> int:
        with self.pool.on_host(span, write=True) as (pool, written):
            return self._write(pool, written)

    def _write(self, pool: PoolMap, span: PoolSpan) -> int:
        wire = np.empty(self.form.payload_bytes if self.int8 else 0, np.uint8)
        cursor = Cursor([wire]) if self.int8 else pool.cursor(span)
        followed = 0
        for message, payload in self._messages():
            cursor.write(message[:payload], self.digest)
            if message.size > payload:
                (followed,) = _TRAILER.unpack_from(message.data, payload)
        if self.int8:
            pool.unpack(dequantise(wire, pool.layout), span)
        return 0 if self.digest is None else self.digest.value() ^ followed

    def skip(self) -> None:
        for _ in self._messages():
            pass

    def _messages(self) -> Iterator[tuple[Bytes, int]]:
        """Messages and their payload sizes. The next message is received while one is processed."""
        before: tuple[Operation, int] | None = None
        for payload, size in self.form.messages():
            operation = self.group.receive(self.buffers.next(size), size)
            if before is not None:
                yield before[0].wait(), before[1]
            before = operation, payload
        if before is not None:
            yield before[0].wait(), before[1]


def _grain_bytes(local: LocalRank, *, int8: bool) -> int:
    """A common divisor of the sizes of a piece's contiguous parts; 1 if quantised."""
    return 1 if int8 else local.layout.token_bytes


def _as_array(data: bytearray) -> Bytes:
    array: Bytes = torch.frombuffer(data, dtype=torch.uint8).numpy()
    return array


def _joined(group: Group | None) -> Group:
    if group is None:
        raise HandoffFault(HandoffCause.TRANSPORT, "process_group: the link is closed")
    return group


@contextmanager
def _library_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _broken(error) from error


def _broken(error: Exception) -> HandoffFault:
    return HandoffFault(HandoffCause.TRANSPORT, f"process_group: {str(error).splitlines()[0][:200]}")
