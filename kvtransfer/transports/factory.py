"""Creates a link's sender and receiver. Only this module imports all transports."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvtransfer.causes import protocol_fault
from kvtransfer.connection.handshake import MAPPED, NCCL, NIXL, Hello, LocalRank
from kvtransfer.connection.stream import FrameStream
from kvtransfer.connection.tls import Wire
from kvtransfer.control import Peer
from kvtransfer.session.piece import MAX_DEVICE_PIECE_BYTES, MAX_MAPPED_PIECE_BYTES, MAX_PIECE_BYTES
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.choice import PROCESS_GROUP, TCP, offered
from kvtransfer.transports.host_support import THIS_HOST, HostSupport
from kvtransfer.transports.mapped import MappedReceiver, MappedSender
from kvtransfer.transports.nixl import NixlEndpoint, NixlReceiver, NixlSender
from kvtransfer.transports.protocol import KvReceiver, KvSender
from kvtransfer.transports.tcp import TcpReceiver, TcpSender
from kvtransfer.transports.threads import AgentThreads, LinkThread
from kvtransfer.versions import supports_int8, supports_large_pieces
from tandem.rpc.versions import common_version

if TYPE_CHECKING:
    from types import ModuleType


class Transports:
    """Creates senders and receivers of an agent's links, and holds what these share. Tests subclass it to inject
    faults."""

    def __init__(self, host: HostSupport = THIS_HOST) -> None:
        self.host = host
        self.threads = AgentThreads()
        self._endpoint: NixlEndpoint | None = None
        self._lock = threading.Lock()

    def thread(self, name: str) -> LinkThread:
        return LinkThread(name, self.threads)

    async def sender(self, kind: str, local: LocalRank, peer: Peer, thread: LinkThread) -> KvSender:
        if kind == MAPPED:
            return MappedSender(local, thread)
        if kind == TCP:
            return TcpSender(local, thread, peer.tcp_address, int8=carries_int8(kind, local, peer))
        if kind == NIXL:
            return NixlSender(local, thread, peer.tcp_address, self.nixl)
        module = await thread.run(_module, kind)
        sender: KvSender
        if kind == NCCL:
            sender = module.NcclSender(local, thread, peer.tcp_address)
        else:
            sender = module.GlooSender(local, thread, peer.tcp_address, int8=carries_int8(kind, local, peer))
        return sender

    async def frames(self, raw: Wire) -> FrameStream:
        """Takes over the link's connection after its handshake."""
        return await FrameStream.over(raw)

    async def receiver(
        self, local: LocalRank, hello: Hello, link: PlannedLink, thread: LinkThread, *, digests: bool
    ) -> KvReceiver:
        """Raises HandoffFault (protocol) or LinkRefused if this agent does not accept the link's transport."""
        kind = hello.transport
        accepted = offered(local, self.host)
        if kind not in accepted:
            raise protocol_fault(f"transport: expected one of {accepted}, got {kind}")
        if kind == MAPPED:
            return MappedReceiver(local, thread, hello, link, digests=digests)
        if kind == TCP:
            return TcpReceiver(local, thread, digests=digests, int8=hello.int8)
        if kind == NIXL:
            return NixlReceiver(local, thread, hello, link, self.nixl, digests=digests)
        module = await thread.run(_module, kind)
        receiver: KvReceiver
        if kind == NCCL:
            receiver = module.NcclReceiver(local, thread, hello, digests=digests)
        else:
            receiver = module.GlooReceiver(local, thread, digests=digests, int8=hello.int8, version=hello.protocol)
        return receiver

    def nixl(self, local: LocalRank) -> NixlEndpoint:
        """The process's endpoint, made when first needed. Call it in a link's thread. Raises HandoffFault."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = NixlEndpoint(local)
            return self._endpoint


def max_piece_bytes(kind: str, version: int, welcomed: int | None = None) -> int:
    """The largest piece of a link. `mapped` carries no bytes, so a piece costs its link only the copy.

    Args:
        welcomed: the receiver's own limit, from its welcome. Only `mapped` has one, and it is the peer's word.
    """
    if kind != MAPPED or not supports_large_pieces(version):
        return MAX_PIECE_BYTES
    if welcomed is None:
        return MAX_MAPPED_PIECE_BYTES
    return min(max(welcomed, MAX_PIECE_BYTES), MAX_DEVICE_PIECE_BYTES)


def carries_int8(kind: str, local: LocalRank, peer: Peer) -> bool:
    """Whether a link to this peer sends int8. Raises IncompatibleVersions if both have no version in common."""
    return local.attach.int8 and kind in (PROCESS_GROUP, TCP) and supports_int8(common_version(local.attach, peer))


def _module(kind: str) -> ModuleType:
    """The module of a transport that needs torch."""
    if kind == NCCL:
        from kvtransfer.transports import nccl  # noqa: PLC0415 - imports torch

        return nccl
    from kvtransfer.transports import gloo  # noqa: PLC0415 - imports torch

    return gloo
