"""Which transport a link uses, and its halves. The only place that knows all transports."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtransfer.control import Peer
from kvtransfer.handshake import Hello, LinkRefused, Own
from kvtransfer.reshard import Link
from kvtransfer.stream import FrameStream
from kvtransfer.transports.mapped import MappedReceiver, MappedSender
from kvtransfer.transports.protocol import KvReceiver, KvSender, LinkThread

if TYPE_CHECKING:
    from types import ModuleType

MAPPED = "mapped"
PROCESS_GROUP = "process_group"
AUTO = "auto"


class Transports:
    """Makes the halves of links; tests subclass it to break things.

    Args:
        device: where `process_group` tensors live ("cpu" means gloo, "cuda:N" means nccl).
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.on_hung: Callable[[str], None] | None = None

    def thread(self, name: str) -> LinkThread:
        """A link's thread; `on_hung` hears of one that does not come back."""
        return LinkThread(name, self.on_hung)

    async def sender(self, kind: str, own: Own, peer: Peer, thread: LinkThread) -> KvSender:
        if kind == MAPPED:
            return MappedSender(own, thread)
        module = await thread.run(_process_group)
        sender: KvSender = module.GroupSender(own, thread, peer.tcp_address, self._device)
        return sender

    async def frames(self, raw: socket.socket) -> FrameStream:
        """The link's connection after its handshake; takes the socket over."""
        return await FrameStream.over(raw)

    async def receiver(self, own: Own, hello: Hello, link: Link, thread: LinkThread, *, digests: bool) -> KvReceiver:
        if hello.transport == MAPPED:
            return MappedReceiver(own, thread, hello, link, digests=digests)
        module = await thread.run(_process_group)
        receiver: KvReceiver = module.GroupReceiver(own, thread, self._device, digests=digests)
        return receiver


def choose_transport(own: Own, peer: Peer) -> str:
    """`mapped` on one host, else `process_group`; or what the configuration forces.

    Raises:
        LinkRefused: what is forced cannot work with this peer.
    """
    wanted = own.attach.transport
    can_map = bool(peer.mapped_path) and peer.host_id == own.host_id
    if wanted != PROCESS_GROUP and can_map:
        return MAPPED
    if wanted != MAPPED and peer.tcp_address:
        return PROCESS_GROUP
    where = "the same" if peer.host_id == own.host_id else "another"
    offers = [name for name, there in ((MAPPED, peer.mapped_path), (PROCESS_GROUP, peer.tcp_address)) if there]
    raise LinkRefused(f"transport: {wanted} cannot reach a peer on {where} host that offers {offers}")


def _process_group() -> ModuleType:
    from kvtransfer.transports import process_group  # noqa: PLC0415 - torch, only where a link needs it

    return process_group
