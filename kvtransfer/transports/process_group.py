"""Across hosts: a two-rank torch.distributed group for each link, with a store of its own. `gloo` on CPU, `nccl` on
CUDA devices, the same code.

The receiver makes the store on a pre-bound port of its own interface and names it in the welcome. Pieces are packed in
canonical order, sent as one tensor, and unpacked from a staging buffer once the session allows it. A dead peer raises
at once; a silent one at the timeout, in the link's thread only.
"""

from __future__ import annotations

import datetime
import secrets
import socket
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.digest import digest_of_bytes
from kvtransfer.handshake import Own, Welcome
from kvtransfer.liveness import STALL_S
from kvtransfer.piece import FrameType, Header, Piece
from kvtransfer.pool import Bytes, PoolMap, Span
from kvtransfer.sockets import listen_tcp, split_address
from kvtransfer.stream import FrameStream
from kvtransfer.transports.protocol import PROBE_BYTES, DataPort, LinkThread

TIMEOUT = datetime.timedelta(seconds=20)  # to meet
PIECE_TIMEOUT = datetime.timedelta(seconds=0.9 * STALL_S)  # gloo's abort wakes nobody: operations must end themselves
_RECEIVER, _SENDER = 0, 1


class _Work(Protocol):
    def wait(self, timeout: datetime.timedelta) -> bool: ...


class _TorchGroup(Protocol):
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...
    def abort(self) -> None: ...


class Group:
    """The two-rank group. All methods block: they run in the link's thread."""

    def __init__(self, store: TCPStore, rank: int, bind_host: str, device: torch.device) -> None:
        self._peer = 1 - rank
        self._device = device
        backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        options = backend.Options() if device.type == "cuda" else backend._Options()
        options._timeout = TIMEOUT
        if device.type != "cuda":
            options._devices = [backend.create_device(hostname=bind_host)]
        self._group: _TorchGroup = backend(PrefixStore("link", store), rank, 2, options)

    def send(self, data: Bytes) -> None:
        try:
            self._group.send([torch.from_numpy(data).to(self._device)], self._peer, 0).wait(PIECE_TIMEOUT)
        except RuntimeError as error:
            raise _broken(error) from error

    def receive(self, size: int) -> Bytes:
        tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            self._group.recv([tensor], self._peer, 0).wait(PIECE_TIMEOUT)
        except RuntimeError as error:
            raise _broken(error) from error
        data: Bytes = tensor.cpu().numpy()
        return data

    def abort(self) -> None:
        self._group.abort()


class GroupSender:
    def __init__(self, own: Own, thread: LinkThread, peer_address: str, device: str) -> None:
        self._own = own
        self._thread = thread
        self._host, _ = split_address(peer_address)
        self._device = torch.device(device)
        self._group: Group | None = None
        self._digests = True

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
            return Group(store, _SENDER, self._own.attach.bind_host, self._device)
        except (RuntimeError, ValueError) as error:
            raise _broken(error) from error

    async def send_probe(self, stream: FrameStream) -> int:
        probe = bytearray(secrets.token_bytes(PROBE_BYTES))
        data = _as_array(probe)
        stream.send(Header(FrameType.PROBE))
        await self._thread.run(_joined(self._group).send, data)
        return digest_of_bytes(data.data)

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: Span) -> None:
        data, digest = await self._thread.run_on(piece.payload_bytes, self._pack, span, piece.payload_bytes)
        stream.send(Header(FrameType.PIECE, ticket_id, piece=replace(piece, digest=digest)))
        await self._thread.run(_joined(self._group).send, data)

    def _pack(self, span: Span, size: int) -> tuple[Bytes, int | None]:
        data = self._own.pool.pack(span, size)
        return data, digest_of_bytes(data.data) if self._digests else None

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


class GroupReceiver:
    def __init__(self, own: Own, thread: LinkThread, device: str, *, digests: bool) -> None:
        self._own = own
        self._thread = thread
        self._device = torch.device(device)
        self._digests = digests
        self._store: TCPStore | None = None
        self._group: Group | None = None

    async def prepare(self, fds: list[int]) -> DataPort:
        if fds:
            raise protocol_fault("process_group: expected no descriptors beside the hello")
        listener = listen_tcp(self._own.attach.bind_host)
        port = int(listener.getsockname()[1])
        self._store = await self._thread.run(self._make_store, listener, port)
        return DataPort(port)

    def _make_store(self, listener: socket.socket, port: int) -> TCPStore:
        host = self._own.attach.bind_host
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
            return Group(self._store, _RECEIVER, self._own.attach.bind_host, self._device)
        except RuntimeError as error:
            raise _broken(error) from error

    async def receive_probe(self) -> int:
        data = await self._thread.run(_joined(self._group).receive, PROBE_BYTES)
        return digest_of_bytes(data.data)

    async def fetch(self, piece: Piece, body: bytes) -> GroupArrival:
        if body:
            raise protocol_fault("process_group: expected a piece without a body")
        data = await self._thread.run(_joined(self._group).receive, piece.payload_bytes)
        return GroupArrival(self._own.pool, data, self._thread, self._digests)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._store = None


@dataclass(frozen=True, slots=True)
class GroupArrival:
    pool: PoolMap
    data: Bytes
    thread: LinkThread
    digests: bool

    async def place(self, span: Span) -> int:
        return await self.thread.run_on(self.data.nbytes, self._write, span)

    async def discard(self) -> None:
        """All of it has arrived."""

    def _write(self, span: Span) -> int:
        self.pool.unpack(self.data, span)
        return digest_of_bytes(self.data.data) if self.digests else 0


def _as_array(data: bytearray) -> Bytes:
    array: Bytes = torch.frombuffer(data, dtype=torch.uint8).numpy()
    return array


def _joined(group: Group | None) -> Group:
    if group is None:
        raise HandoffFault(HandoffCause.TRANSPORT, "process_group: the link is closed")
    return group


def _broken(error: Exception) -> HandoffFault:
    return HandoffFault(HandoffCause.TRANSPORT, f"process_group: {str(error).splitlines()[0][:200]}")
