"""Chooses a link's transport and creates its sender and receiver. Only this module imports all transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvtransfer.causes import protocol_fault
from kvtransfer.connection.handshake import MAPPED as MAPPED
from kvtransfer.connection.handshake import Hello, LinkRefused, LocalRank
from kvtransfer.connection.stream import FrameStream
from kvtransfer.connection.tls import Wire
from kvtransfer.control import Peer
from kvtransfer.pool.pool import PoolMap
from kvtransfer.session.piece import MAX_MAPPED_PIECE_BYTES, MAX_PIECE_BYTES
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.mapped import MappedReceiver, MappedSender
from kvtransfer.transports.nixl import NixlReceiver, NixlSender, check_nixl
from kvtransfer.transports.protocol import KvReceiver, KvSender, LinkThread
from kvtransfer.transports.tcp import TcpReceiver, TcpSender
from kvtransfer.versions import common_version, supports_int8, supports_large_pieces
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

PROCESS_GROUP = "process_group"
TCP = "tcp"
NIXL = "nixl"
AUTO = "auto"


class Transports:
    """Creates senders and receivers of links. Tests subclass it to inject faults.

    Args:
        device: device of `process_group` tensors ("cpu" means gloo, "cuda:N" means nccl).
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.on_hung: Callable[[str], None] | None = None

    def thread(self, name: str) -> LinkThread:
        """A link's thread. `on_hung` is called if an operation in it hangs."""
        return LinkThread(name, self.on_hung)

    async def sender(self, kind: str, local: LocalRank, peer: Peer, thread: LinkThread) -> KvSender:
        if kind == MAPPED:
            return MappedSender(local, thread)
        int8 = carries_int8(kind, local, peer)
        if kind == TCP:
            return TcpSender(local, thread, peer.tcp_address, int8=int8)
        if kind == NIXL:
            return NixlSender(local, thread, peer.tcp_address)
        module = await thread.run(_process_group)
        sender: KvSender = module.GroupSender(local, thread, peer.tcp_address, self._device, int8=int8)
        return sender

    async def frames(self, raw: Wire) -> FrameStream:
        """Takes over the link's connection after its handshake."""
        return await FrameStream.over(raw)

    async def receiver(
        self, local: LocalRank, hello: Hello, link: PlannedLink, thread: LinkThread, *, digests: bool
    ) -> KvReceiver:
        """Raises HandoffFault (protocol) or LinkRefused if this agent does not accept the link's transport."""
        if hello.transport not in offered(local):
            raise protocol_fault(f"transport: expected one of {offered(local)}, got {hello.transport}")
        if hello.transport == MAPPED:
            return MappedReceiver(local, thread, hello, link, digests=digests)
        if hello.transport == TCP:
            return TcpReceiver(local, thread, digests=digests, int8=hello.int8)
        if hello.transport == NIXL:
            _require(NIXL)
            return NixlReceiver(local, thread, hello, link, digests=digests)
        module = await thread.run(_process_group)
        receiver: KvReceiver = module.GroupReceiver(
            local, thread, self._device, digests=digests, int8=hello.int8, version=hello.protocol
        )
        return receiver


def check_available(transport: str) -> None:
    """Raises ConfigError if this transport is configured and its library is not installed."""
    if transport == NIXL:
        check_nixl()


def _require(transport: str) -> None:
    try:
        check_available(transport)
    except ConfigError as error:
        raise LinkRefused(error.message) from error


def offered(local: LocalRank) -> tuple[str, ...]:
    """The transports that the configuration allows, `mapped` first. With TLS, only encrypted ones cross hosts."""
    allowed = (MAPPED, TCP) if local.tls is not None else (MAPPED, PROCESS_GROUP, TCP, NIXL)
    wanted = local.attach.transport
    return tuple(kind for kind in allowed if wanted == kind or (wanted == AUTO and kind != NIXL))


def max_piece_bytes(kind: str, version: int) -> int:
    """The largest piece of a link, at both ends. `mapped` carries no bytes, so a piece costs its link only the copy."""
    return MAX_MAPPED_PIECE_BYTES if kind == MAPPED and supports_large_pieces(version) else MAX_PIECE_BYTES


def carries_int8(kind: str, local: LocalRank, peer: Peer) -> bool:
    """Whether a link to this peer sends int8. Raises IncompatiblePools if both have no protocol version in common."""
    return local.attach.int8 and kind in (PROCESS_GROUP, TCP) and supports_int8(common_version(local.attach, peer))


class TransportChoice(NamedTuple):
    """A transport, and the reason why `mapped` was not possible on the same host, if so."""

    kind: str
    reason: str = ""


def choose_transport(local: LocalRank, peer: Peer) -> TransportChoice:
    """The configured transport. auto: `mapped` within a host, else `process_group`, or `tcp` with TLS.

    Raises:
        LinkRefused: the configured transport cannot work with this peer.
    """
    _require(local.attach.transport)
    if local.attach.transport == NIXL and local.device:
        raise LinkRefused("transport: nixl cannot register pools in device memory; set another transport or auto")
    reason = ""
    for kind in offered(local):
        if kind == MAPPED and peer.mapped_path and peer.host_id == local.host_id:
            reason = _why_not_mapped(local, peer)
            if not reason:
                return TransportChoice(kind)
        if kind != MAPPED and peer.tcp_address:
            return TransportChoice(kind, reason)
    if reason:
        raise LinkRefused(f"transport: {reason}")
    where = "the same" if peer.host_id == local.host_id else "another"
    reach = [name for name, there in (("a unix socket", peer.mapped_path), ("TCP", peer.tcp_address)) if there]
    encrypted = " with TLS" if local.tls is not None else ""
    raise LinkRefused(
        f"transport: {local.attach.transport}{encrypted} cannot reach a peer on {where} host that listens on {reach}"
    )


def _why_not_mapped(local: LocalRank, peer: Peer) -> str:
    """Empty if the peer, on the same host, can map our pool."""
    if not local.device and not peer.device:
        return ""
    if not local.device or not peer.device:
        ours, theirs = local.device or "host memory", peer.device or "host memory"
        return f"mapped: our pool is in {ours}, the peer's in {theirs}"
    if not isinstance(local.pool, PoolMap) and local.pool.reaches(peer.device, local.device):
        return ""
    return f"mapped: GPU {peer.device} cannot read the memory of GPU {local.device}, or one of them is not visible"


def _process_group() -> ModuleType:
    from kvtransfer.transports import process_group  # noqa: PLC0415 - imports torch

    return process_group
