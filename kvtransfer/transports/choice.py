"""Which transport a link uses, and why not a faster one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from kvtransfer.connection.handshake import MAPPED, NCCL, NIXL, LinkRefused, LocalRank
from kvtransfer.control import HOST_DEVICE, Peer
from kvtransfer.pool.pool import PoolMap
from kvtransfer.transports.host_support import THIS_HOST, HostSupport, missing_library
from tandem.errors import ConfigError

PROCESS_GROUP = "process_group"
TCP = "tcp"
AUTO = "auto"
FASTEST_FIRST = (MAPPED, NIXL, NCCL, TCP)
ENCRYPTED = (MAPPED, TCP)  # mapped never leaves the host
_NONE: Mapping[str, str] = MappingProxyType({})


class TransportChoice(NamedTuple):
    """A transport, and why it is slower than these hosts allow, with the remedy; empty if it is not."""

    kind: str
    reason: str = ""


def check_available(transport: str, *, on_gpu: bool) -> None:
    """Raises ConfigError if this transport is configured and this process cannot use it. `on_gpu`: the rank's pool."""
    check_support(transport, missing_library(transport) if on_gpu or transport != NCCL else "")


def check_support(transport: str, missing: str) -> None:
    """Raises ConfigError if `missing` says why the configured transport cannot be used."""
    if missing:
        raise ConfigError(
            f"transfer.transport: {transport}: {missing}, or set another transport (auto takes the fastest that works)",
            field="transfer.transport",
        )


def offered(local: LocalRank, host: HostSupport = THIS_HOST) -> tuple[str, ...]:
    """The transports that this agent accepts, the fastest first. With TLS, only encrypted ones cross hosts."""
    wanted = local.attach.transport
    kinds = FASTEST_FIRST if wanted == AUTO else (wanted,)
    here = (*kinds, PROCESS_GROUP) if wanted == AUTO else kinds  # what a release before this one chooses
    rules = _Rules(local, host, wanted == AUTO)
    return tuple(kind for kind in here if not rules.why_not_here(kind))


def choose_transport(
    local: LocalRank, peer: Peer, host: HostSupport = THIS_HOST, failed: Mapping[str, str] = _NONE
) -> TransportChoice:
    """The configured transport; auto: the fastest of `FASTEST_FIRST` that works with this peer.

    Args:
        failed: transports with which the link could not be opened, and why. Used only if no other works.

    Raises:
        LinkRefused: no configured transport can work with this peer.
    """
    wanted = local.attach.transport
    rules = _Rules(local, host, wanted == AUTO)
    refused: dict[str, str] = {}
    for kind in FASTEST_FIRST if wanted == AUTO else (wanted,):
        why = failed.get(kind) or rules.why_not(kind, peer)
        if not why:
            return TransportChoice(kind, "; ".join(_faster(kind, local, peer, host, refused, failed)))
        refused[kind] = why
    if failed:
        return choose_transport(local, peer, host)
    reasons = "; ".join(f"{kind}: {why}" for kind, why in refused.items())
    raise LinkRefused(f"transport: no link to {peer.worker_id} is possible: {reasons}")


@dataclass(frozen=True, slots=True)
class _Rules:
    """What each transport needs of both ends."""

    local: LocalRank
    host: HostSupport
    is_automatic: bool  # then a transport that would work, but badly, is not used

    def why_not(self, kind: str, peer: Peer) -> str:
        """Why a transport cannot be used with this peer; empty if it can."""
        return self.why_not_between(kind, peer) or self._why_not_accepted(kind, peer)

    def why_not_here(self, kind: str) -> str:
        """Empty if this agent can use the transport with a fitting peer."""
        device = self.local.device
        if self.local.tls is not None and kind not in ENCRYPTED:
            return (
                "it cannot be encrypted, and TLS is configured: if the network between the hosts is trusted, or "
                "encrypts by itself, unset transfer.tls and security.tls (in the chart tls.internal)"
            )
        if kind == NIXL:
            if self.is_automatic and not self.host.has_rdma():
                return "this process may use no RDMA device"
            return self.host.missing(NIXL)
        if kind == NCCL:
            if not device or (device == HOST_DEVICE and self.is_automatic):
                return "our pool is in host memory"
            return "" if device == HOST_DEVICE else self.host.missing(NCCL)  # there it runs over gloo
        return ""

    def why_not_between(self, kind: str, peer: Peer) -> str:
        """Empty if the transport works between the two, apart from the peer's configuration and libraries."""
        local = self.local
        if why := self.why_not_here(kind):
            return why
        if kind == MAPPED:
            return _why_not_mapped(local, peer)
        if kind == NCCL and peer.device == local.device != HOST_DEVICE:
            return "both pools are on one GPU"
        if (kind == NCCL and not peer.device) or (kind == NIXL and bool(local.device) != bool(peer.device)):
            return _other_memory(local, peer)
        return ""

    def _why_not_accepted(self, kind: str, peer: Peer) -> str:
        if kind == NCCL and not peer.transports:
            return "the peer is of an earlier release"
        if peer.transports and kind not in peer.transports:
            return f"the peer accepts only {', '.join(peer.transports)}: configure and install the same on all workers"
        if not (peer.mapped_path if kind == MAPPED else peer.tcp_address):
            return f"the peer listens only on a {'TCP port' if kind == MAPPED else 'unix socket'}"
        if kind == NIXL and not peer.transports and self.is_automatic:
            return "the peer is of an earlier release"
        return ""


def _why_not_mapped(local: LocalRank, peer: Peer) -> str:
    if peer.host_id != local.host_id:
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


def _other_memory(local: LocalRank, peer: Peer) -> str:
    ours, theirs = (device or "host memory" for device in (local.device, peer.device))
    return f"our pool is in {ours}, the peer's in {theirs}: set the same engine.device for both roles"


def _faster(
    kind: str, local: LocalRank, peer: Peer, host: HostSupport, refused: Mapping[str, str], failed: Mapping[str, str]
) -> Iterator[str]:
    """Why each faster transport that this hardware allows is not used."""
    rules = _Rules(local, host, is_automatic=True)
    for name in FASTEST_FIRST:
        if name == kind:
            return
        if name not in failed and not _hardware_allows(name, local, peer, host):
            continue
        if why := refused.get(name) or rules.why_not_between(name, peer):
            yield f"{name}: {why}"
            continue
        yield f"{name} is faster here, and transfer.transport is {kind}: set it to auto"
        return


def _hardware_allows(kind: str, local: LocalRank, peer: Peer, host: HostSupport) -> bool:
    if kind == MAPPED:
        return peer.machine_id == local.machine_id
    if kind == NIXL:
        return host.has_rdma()
    if kind == NCCL:
        return HOST_DEVICE not in (local.device, peer.device) and "" != local.device != peer.device != ""
    return True
