"""Between GPUs that cannot read each other's memory: NCCL, from device memory to device memory.

The sender gathers a piece into device staging and digests it there. The receiver gets it in its own staging, digests
it, and scatters it into its blocks only if the digest is right. No byte passes through host memory. Each link has a
communicator of its own, made with the link and aborted with it: NCCL runs the operations of a communicator in order, so
two directions in one could wait for each other.

With pools on torch's device "cpu" the same code runs over gloo.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtransfer.causes import HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.handshake import KEY_BITS, MULTILINEAR, Hello, LocalRank, Welcome
from kvtransfer.connection.stream import FrameStream
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import DevicePool, device_errors
from kvtransfer.pool.digest import digest_of_bytes
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.session.piece import FrameType, Header, Piece
from kvtransfer.transports.process_group import (
    TIMEOUT,
    Group,
    GroupReceiver,
    GroupSender,
    MessageArrival,
    Work,
    joined,
)
from kvtransfer.transports.protocol import PROBE_BYTES, WelcomeTerms
from kvtransfer.transports.threads import LinkThread

POLL_S = 20e-6


def device_pool(local: LocalRank) -> DevicePool:
    """Raises HandoffFault (protocol) if the pool is in host memory."""
    if not isinstance(local.pool, DevicePool):
        raise protocol_fault("nccl: expected a pool in device memory, got one in host memory")
    return local.pool


class DeviceMessages:
    """Moves tensors between the devices of a link's ends. Used in the link's thread."""

    def __init__(self, pool: DevicePool, group: Group, thread: LinkThread) -> None:
        self.pool = pool
        self._group = group
        self._thread = thread

    def send(self, data: Tensor) -> None:
        """Raises HandoffFault (transport) if the link was closed, which it is if the peer stalls."""
        self._move(lambda: self._group.send(data))

    def receive(self, data: Tensor) -> None:
        """Raises like `send`."""
        self._move(lambda: self._group.receive(data))

    def _move(self, start: Callable[[], Work]) -> None:
        if self.pool.device.type == "cpu":
            self._over_gloo(start)
            return
        try:
            moved = self.pool.start(lambda: self._group.wait(start()))
        except BaseException:
            self._group.abort()
            self.pool.run(lambda: None)  # waits: now nothing uses the staging
            raise
        deadline_s = time.monotonic() + TIMEOUT.total_seconds()
        is_late = False
        with self._thread.waiting(), device_errors():
            while not moved.query():
                is_late = time.monotonic() > deadline_s
                if is_late or self._group.is_closed:
                    self._group.abort()
                    moved.synchronize()  # now nothing writes to the staging
                    break
                time.sleep(POLL_S)
        if is_late or self._group.is_closed:  # an abort ends the operation too, as if it had moved
            raise HandoffFault(HandoffCause.TRANSPORT, "nccl: the peer did not take part in time, or the link closed")

    def _over_gloo(self, start: Callable[[], Work]) -> None:
        work = start()
        try:
            self._group.wait(work)
        except BaseException:
            del work
            self._group.destroy()  # before another link gets the staging
            raise


class NcclSender(GroupSender):
    def __init__(self, local: LocalRank, thread: LinkThread, peer_address: str) -> None:
        self._pool = device_pool(local)
        super().__init__(local, thread, peer_address, self._pool.device)
        self._keys: DigestKeys | None = None

    async def establish(self, welcome: Welcome) -> None:
        if welcome.digest_kind != MULTILINEAR or not 0 <= welcome.digest_key < 1 << KEY_BITS:
            raise protocol_fault(f"nccl: expected {MULTILINEAR} digests in the welcome, got {welcome.digest_kind}")
        if welcome.digests:
            self._keys = await self._thread.run(self._pool.make_keys, welcome.digest_key)
        await super().establish(welcome)

    def _messages(self) -> DeviceMessages:
        return DeviceMessages(self._pool, joined(self._group), self._thread)

    async def send_probe(self, stream: FrameStream) -> int:
        probe = bytearray(secrets.token_bytes(PROBE_BYTES))
        stream.send(Header(FrameType.PROBE))
        data = torch.frombuffer(probe, dtype=torch.uint8)
        messages = self._messages()
        await self._thread.run(lambda: messages.send(data.to(self._pool.device)))
        return digest_of_bytes(memoryview(probe))

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        """The digest is in the announcement, so the piece is gathered before it is announced."""
        messages = self._messages()

        def announce(digest: int | None) -> None:
            header = Header(FrameType.PIECE, ticket_id, piece=replace(piece, digest=digest))
            loop.call_soon_threadsafe(stream.send, header)

        loop = asyncio.get_running_loop()
        await self._thread.run(self._send, messages, piece.payload_bytes, span, announce)

    def _send(
        self, messages: DeviceMessages, size: int, span: PoolSpan, announce: Callable[[int | None], None]
    ) -> None:
        with self._pool.staging.lease(size, receives=False) as staging:
            data = self._pool.pack(span, staging)
            announce(None if self._keys is None else self._pool.digest_packed(data, span, self._keys))
            messages.send(data)


class NcclReceiver(GroupReceiver):
    def __init__(self, local: LocalRank, thread: LinkThread, hello: Hello, *, digests: bool) -> None:
        self._pool = device_pool(local)
        super().__init__(local, thread, self._pool.device)
        if MULTILINEAR not in hello.digest_kinds:
            raise protocol_fault(f"nccl: expected digests of kind {MULTILINEAR}, got {hello.digest_kinds}")
        self._digests = digests
        self._keys: DigestKeys | None = None

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        key = secrets.randbits(KEY_BITS)
        if self._digests:
            self._keys = await self._thread.run(self._pool.make_keys, key)
        terms = await super().prepare(fds)
        return terms._replace(digest_kind=MULTILINEAR, digest_key=key)

    def _messages(self) -> DeviceMessages:
        return DeviceMessages(self._pool, joined(self._group), self._thread)

    async def receive_probe(self) -> int:
        return await self._thread.run(self._receive_probe, self._messages())

    def _receive_probe(self, messages: DeviceMessages) -> int:
        with self._pool.staging.lease(PROBE_BYTES, receives=True) as data:
            messages.receive(data)  # NCCL connects with the first message
            return digest_of_bytes(data.cpu().numpy().data)

    async def fetch(self, piece: Piece, body: bytes) -> MessageArrival:
        if body:
            raise protocol_fault("nccl: expected a piece without a body")
        if (piece.digest is not None) != self._digests:
            raise protocol_fault("nccl: expected digests as agreed in the welcome")
        return MessageArrival(_Transfer(self._messages(), piece, self._keys), self._thread)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The transfer of one piece, in the link's thread."""

    messages: DeviceMessages
    piece: Piece
    keys: DigestKeys | None

    def write(self, span: PoolSpan) -> int:
        pool = self.messages.pool
        with pool.staging.lease(self.piece.payload_bytes, receives=True) as data:
            self.messages.receive(data)
            digest = 0 if self.keys is None else pool.digest_packed(data, span, self.keys)
            if self.piece.digest in (None, digest):
                pool.unpack(data, span)
            return digest

    def skip(self) -> None:
        with self.messages.pool.staging.lease(self.piece.payload_bytes, receives=True) as data:
            self.messages.receive(data)
