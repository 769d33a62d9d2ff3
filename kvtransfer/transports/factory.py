"""Chooses a link's transport, and creates its sender and receiver. Only this module imports all transports."""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvtransfer.causes import protocol_fault
from kvtransfer.connection.handshake import MAPPED as MAPPED
from kvtransfer.connection.handshake import NCCL, NIXL, Hello, LinkRefused, LocalRank
from kvtransfer.connection.stream import FrameStream
from kvtransfer.connection.tls import Wire
from kvtransfer.control import HOST_DEVICE, Peer
from kvtransfer.pool.pool import PoolMap
from kvtransfer.session.piece import MAX_MAPPED_PIECE_BYTES, MAX_PIECE_BYTES
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.mapped import MappedReceiver, MappedSender
from kvtransfer.transports.nixl import NixlEndpoint, NixlReceiver, NixlSender, check_nixl, has_rdma
from kvtransfer.transports.protocol import KvReceiver, KvSender
from kvtransfer.transports.tcp import TcpReceiver, TcpSender
from kvtransfer.transports.threads import AgentThreads, LinkThread
from kvtransfer.versions import common_version, supports_int8, supports_large_pieces

if TYPE_CHECKING:
    from types import ModuleType

PROCESS_GROUP = "process_group"
TCP = "tcp"
AUTO = "auto"
FASTEST_FIRST = (MAPPED, NIXL, NCCL, TCP)
ENCRYPTED = (MAPPED, TCP)  # mapped never leaves the host


class Transports:
    """Creates senders and receivers of an agent's links, and holds what these share. Tests subclass it to inject
    faults."""

    def __init__(self) -> None:
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
        if kind not in offered(local):
            raise protocol_fault(f"transport: expected one of {offered(local)}, got {kind}")
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


def check_available(transport: str) -> None:
    """Raises ConfigError if this transport is configured and its library is not installed."""
    if transport == NIXL:
        check_nixl()


def offered(local: LocalRank) -> tuple[str, ...]:
    """The transports that this agent accepts, the fastest first. With TLS, only encrypted ones cross hosts."""
    wanted = local.attach.transport
    kinds = FASTEST_FIRST if wanted == AUTO else (wanted,)
    here = (*kinds, PROCESS_GROUP) if wanted == AUTO else kinds  # what a release before this one chooses
    return tuple(kind for kind in here if (local.tls is None or kind in ENCRYPTED) and _why_not_here(kind, local) == "")


def _why_not_here(kind: str, local: LocalRank) -> str:
    """Empty if this agent can use the transport with a fitting peer."""
    is_automatic = local.attach.transport == AUTO
    if kind == NIXL:
        if importlib.util.find_spec("nixl") is None:
            return "nixl is not installed: pip install 'tandem-serve[nixl]'"
        return "" if has_rdma() or not is_automatic else "this host has no RDMA device"
    if kind == NCCL:
        return (
            "" if local.device and (local.device != HOST_DEVICE or not is_automatic) else "our pool is in host memory"
        )
    return ""


def max_piece_bytes(kind: str, version: int) -> int:
    """The largest piece of a link, at both ends. `mapped` carries no bytes, so a piece costs its link only the copy."""
    return MAX_MAPPED_PIECE_BYTES if kind == MAPPED and supports_large_pieces(version) else MAX_PIECE_BYTES


def carries_int8(kind: str, local: LocalRank, peer: Peer) -> bool:
    """Whether a link to this peer sends int8. Raises IncompatiblePools if both have no protocol version in common."""
    return local.attach.int8 and kind in (PROCESS_GROUP, TCP) and supports_int8(common_version(local.attach, peer))


class TransportChoice(NamedTuple):
    """A transport, and why it is slower than these hosts allow, with the remedy; empty if it is not."""

    kind: str
    reason: str = ""


def choose_transport(local: LocalRank, peer: Peer) -> TransportChoice:
    """The configured transport; auto: the fastest of `FASTEST_FIRST` that works with this peer.

    Raises:
        LinkRefused: no configured transport can work with this peer.
    """
    wanted = local.attach.transport
    refused: dict[str, str] = {}
    for kind in FASTEST_FIRST if wanted == AUTO else (wanted,):
        why = _why_not(kind, local, peer)
        if not why:
            return TransportChoice(kind, _worth_telling(kind, local, peer, refused))
        refused[kind] = why
    reasons = "; ".join(f"{kind}: {why}" for kind, why in refused.items())
    raise LinkRefused(f"transport: no link to {peer.worker_id} is possible: {reasons}")


def _why_not(kind: str, local: LocalRank, peer: Peer) -> str:
    """Why a transport cannot be used with this peer; empty if it can."""
    wanted = local.attach.transport
    if local.tls is not None and kind not in ENCRYPTED:
        return "it cannot be encrypted, and TLS is configured"
    if why := _why_not_here(kind, local):
        return why
    if kind == MAPPED:
        return _why_not_mapped(local, peer)
    if kind == NCCL and (why := _why_not_nccl(local, peer)):
        return why
    if peer.transports and kind not in peer.transports:
        return f"the peer accepts only {', '.join(peer.transports)}: configure and install the same on all workers"
    if not peer.tcp_address:
        return "the peer listens only on a unix socket"
    if kind == NIXL and not peer.transports and wanted == AUTO:
        return "the peer is of an earlier release"
    if kind == NIXL and bool(local.device) != bool(peer.device):
        return _other_memory(local, peer)
    return ""


def _why_not_mapped(local: LocalRank, peer: Peer) -> str:
    if not peer.mapped_path or peer.host_id != local.host_id:
        if peer.machine_id and peer.machine_id == local.machine_id:
            return "the peer is on this machine, but in another container or of another user: run both in one pod"
        return "the peer is on another host"
    if bool(local.device) != bool(peer.device):
        return _other_memory(local, peer)
    if isinstance(local.pool, PoolMap) or local.pool.reaches(peer.device, local.device):
        return ""
    return (
        f"GPU {peer.device} cannot read the memory of GPU {local.device}: each process must see both GPUs, and the "
        "driver must allow peer access (`tandem doctor` shows it)"
    )


def _why_not_nccl(local: LocalRank, peer: Peer) -> str:
    if not peer.device:
        return _other_memory(local, peer)
    if peer.device == local.device != HOST_DEVICE:
        return "both pools are on one GPU"
    return "" if peer.transports else "the peer is of an earlier release"


def _other_memory(local: LocalRank, peer: Peer) -> str:
    return f"our pool is in {local.device or 'host memory'}, the peer's in {peer.device or 'host memory'}"


def _worth_telling(kind: str, local: LocalRank, peer: Peer, refused: dict[str, str]) -> str:
    """The reasons against faster transports that this hardware allows."""
    told = []
    if MAPPED in refused and peer.machine_id == local.machine_id:
        told.append(MAPPED)
    if NIXL in refused and has_rdma():
        told.append(NIXL)
    if NCCL in refused and kind == TCP and local.device and peer.device:
        told.append(NCCL)
    return "; ".join(f"{name}: {refused[name]}" for name in told)


def _module(kind: str) -> ModuleType:
    """The module of a transport that needs torch."""
    if kind == NCCL:
        from kvtransfer.transports import nccl  # noqa: PLC0415 - imports torch

        return nccl
    from kvtransfer.transports import process_group  # noqa: PLC0415 - imports torch

    return process_group
