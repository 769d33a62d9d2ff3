"""Between hosts: a two-rank torch.distributed group per link, with its own store. gloo and NCCL move pieces through it.

The receiver creates the store on a pre-bound port of its interface and sends the port in the welcome. A dead peer
raises an error at once. A silent one does when its link is closed, which ends the group's operations.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.handshake import LocalRank, Welcome
from kvtransfer.connection.sockets import listen_tcp, split_address
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.transports.protocol import WelcomeTerms
from kvtransfer.transports.threads import LinkThread

TIMEOUT = datetime.timedelta(seconds=20)  # for the rendezvous, and for pieces; a stalled link is closed sooner
ABORT_S = 5.0  # longest abort of a communicator
_RECEIVER, _SENDER = 0, 1
_NO_MESSAGE = 1  # a tag
_AT_ONCE = datetime.timedelta(milliseconds=1)


class Work(Protocol):
    def wait(self, timeout: datetime.timedelta = ...) -> bool: ...


class _TorchGroup(Protocol):
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...
    def abort(self) -> None: ...


class Group:
    """The two-rank group of one link: NCCL if `device` is a GPU, else gloo. Used in the link's thread."""

    def __init__(self, store: TCPStore, rank: int, local: LocalRank, thread: LinkThread, device: torch.device) -> None:
        self.is_closed = False
        self._peer = 1 - rank
        self._thread = thread
        self._device = device
        backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        options = backend.Options() if device.type == "cuda" else backend._Options()
        options._timeout = TIMEOUT
        if device.type == "cuda":
            options.is_high_priority_stream = True  # from other streams than those of links' threads
        else:
            options._devices = [gloo_sockets(local.attach.bind_host)]
        self._group: _TorchGroup | None = backend(PrefixStore("link", store), rank, 2, options)

    def send(self, tensor: Tensor) -> Work:
        with _library_errors():
            return self._open().send([tensor], self._peer, 0)

    def receive(self, tensor: Tensor) -> Work:
        """gloo accepts shorter messages, but aborts the process on one longer than the tensor. So pass it all of a
        buffer; the digest detects a faulty peer's data."""
        with _library_errors():
            return self._open().recv([tensor], self._peer, 0)

    def wait(self, work: Work) -> None:
        """gloo: until the message has been moved. NCCL: makes the current stream wait for it."""
        if self._device.type == "cuda":
            with _library_errors():
                work.wait()  # with a timeout, torch would block this thread
            return
        with self._thread.waiting(), _library_errors():
            work.wait(TIMEOUT)

    def abort(self) -> None:
        """Ends the operations of the group with an error."""
        if (group := self._group) is None:
            return
        if self._device.type == "cuda":
            group.abort()
            return
        with suppress(RuntimeError):  # gloo's abort wakes no waiter, but one operation's timeout wakes all
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NO_MESSAGE).wait(_AT_ONCE)

    def close(self) -> None:
        """On the loop; never waits. An abort that hangs ends the process."""
        self.is_closed = True
        aborting = threading.Thread(target=self.abort, name="group-abort", daemon=True)
        aborting.start()
        asyncio.get_running_loop().call_later(ABORT_S, lambda: self._thread.hung() if aborting.is_alive() else None)

    def destroy(self) -> None:
        """Frees the group, after which gloo no longer uses its messages' memory."""
        self._group = None

    def _open(self) -> _TorchGroup:
        if self._group is None or self.is_closed:
            raise HandoffFault(HandoffCause.TRANSPORT, "torch.distributed: the link failed before")
        return self._group


@cache
def gloo_sockets(host: str) -> Any:
    """What all groups of an agent share: an address, and a thread of gloo's."""
    backend: Any = dist.ProcessGroupGloo
    return backend.create_device(hostname=host)


class GroupSender:
    """Joins the receiver's group. Subclasses move the pieces."""

    def __init__(self, local: LocalRank, thread: LinkThread, peer_address: str, device: torch.device) -> None:
        self._local = local
        self._thread = thread
        self._host, _ = split_address(peer_address)
        self._device = device
        self._group: Group | None = None

    def hello_fds(self) -> list[int]:
        return []

    async def establish(self, welcome: Welcome) -> None:
        if welcome.data_port is None:
            raise protocol_fault("process_group: expected the store's port in the welcome")
        self._group = await self._thread.run(self._join, welcome.data_port)

    def _join(self, port: int) -> Group:
        try:
            with self._thread.waiting():
                store = TCPStore(self._host, port, None, False, TIMEOUT, False)
                return Group(store, _SENDER, self._local, self._thread, self._device)
        except (RuntimeError, ValueError) as error:
            raise _broken(error) from error

    async def settle(self) -> None:
        """Does nothing: `push` announces at once."""

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class GroupReceiver:
    """Creates the store, and joins the group. Subclasses take the pieces."""

    places_ahead = False

    def __init__(self, local: LocalRank, thread: LinkThread, device: torch.device) -> None:
        self._local = local
        self._thread = thread
        self._device = device
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
            with self._thread.waiting():
                return Group(self._store, _RECEIVER, self._local, self._thread, self._device)
        except RuntimeError as error:
            raise _broken(error) from error

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._store = None


class Transfer(Protocol):
    """The transfer of one piece, in the link's thread."""

    def write(self, span: PoolSpan) -> int: ...
    def skip(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MessageArrival:
    """An announced piece. Its messages are in transit and must be received, even if the piece is not used."""

    digest_follows = False  # it follows the bytes instead of in a frame

    transfer: Transfer
    thread: LinkThread

    async def place(self, span: PoolSpan) -> int:
        return await self.thread.run(self.transfer.write, span)

    async def discard(self) -> None:
        await self.thread.run(self.transfer.skip)


def joined(group: Group | None) -> Group:
    if group is None:
        raise HandoffFault(HandoffCause.TRANSPORT, "torch.distributed: the link is closed")
    return group


@contextmanager
def _library_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _broken(error) from error


def _broken(error: Exception) -> HandoffFault:
    return HandoffFault(HandoffCause.TRANSPORT, f"torch.distributed: {str(error).splitlines()[0][:200]}")
