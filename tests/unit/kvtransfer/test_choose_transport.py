"""Which transport a link gets: the fastest that works, and why it is not a faster one."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from kvtransfer.connection.handshake import LinkRefused, LocalRank
from kvtransfer.control import AttachPool, DeviceMemory, Peer, WireLayout
from kvtransfer.pool.pool import PoolMap
from kvtransfer.transports import factory
from kvtransfer.transports.factory import choose_transport, offered
from tandem.kvcache.layout import KvPoolLayout

ALL = ("mapped", "nixl", "nccl", "tcp", "process_group")
HERE = Peer("decode-0", 1, 0, 1, "here", "socket", "127.0.0.1:1", machine_id="machine", transports=ALL)
THERE = Peer("decode-0", 1, 0, 1, "there", "socket", "10.0.0.2:1", machine_id="other", transports=ALL)


def at(peer: Peer, **changes: Any) -> Peer:
    return msgspec.structs.replace(peer, **changes)


@dataclass
class GpuPool:
    """Which GPUs' memory ours can read."""

    readable: tuple[str, ...] = ()

    def reaches(self, reader: str, owner: str) -> bool:
        return reader == owner or reader in self.readable


def local(transport: str = "auto", device: str = "", *, reads: tuple[str, ...] = (), tls: bool = False) -> LocalRank:
    attach = AttachPool(
        "prefill-0", 1, 0, 1, 1, "", WireLayout(1, 1, 1, 1, 8, "float32"), b"", True, transport, "", "", 1.0,
        memory=DeviceMemory(device, 0) if device else None,
    )  # fmt: skip
    pool = GpuPool(reads) if device else PoolMap(KvPoolLayout(1, 1, 1, 1, 8, "float32"), bytearray(64))
    certificates = type("Tls", (), {"current": lambda self: self})() if tls else None
    return LocalRank(attach, cast(Any, pool), None, "here", "machine", cast(Any, None), certificates)


@pytest.fixture(autouse=True)
def no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "has_rdma", lambda: False)


@pytest.fixture
def rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an RDMA device and NIXL."""
    monkeypatch.setattr(factory, "has_rdma", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("device", "peer", "expected"),
    [
        ("", HERE, "mapped"),
        ("", THERE, "tcp"),
        ("GPU-a", at(HERE, device="GPU-a"), "mapped"),
        ("GPU-a", at(THERE, device="GPU-b"), "nccl"),
    ],
)
def test_auto_takes_the_fastest_and_has_nothing_to_explain(device: str, peer: Peer, expected: str) -> None:
    assert choose_transport(local(device=device), peer) == (expected, "")


def test_peer_access_decides_between_gpus_of_a_host() -> None:
    peer = at(HERE, device="GPU-b")
    assert choose_transport(local(device="GPU-a", reads=("GPU-b",)), peer) == ("mapped", "")
    kind, reason = choose_transport(local(device="GPU-a"), peer)
    assert kind == "nccl"
    assert "mapped: GPU GPU-b cannot read the memory of GPU GPU-a" in reason
    assert "tandem doctor" in reason


@pytest.mark.usefixtures("rdma")
def test_rdma_comes_before_nccl_and_is_missed_where_the_peer_has_none() -> None:
    ours, peer = local(device="GPU-a"), at(THERE, device="GPU-b")
    assert choose_transport(ours, peer) == ("nixl", "")
    kind, reason = choose_transport(ours, at(peer, transports=("mapped", "nccl", "tcp")))
    assert kind == "nccl"
    assert reason.startswith("nixl: the peer accepts only mapped, nccl, tcp: configure and install the same")


def test_rdma_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "has_rdma", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kind, reason = choose_transport(local(), THERE)
    assert kind == "tcp"
    assert "pip install 'tandem-serve[nixl]'" in reason


def test_two_containers_of_a_machine_are_told_apart_from_two_machines() -> None:
    kind, reason = choose_transport(local(), at(HERE, host_id="container"))
    assert kind == "tcp"
    assert "in another container or of another user: run both in one pod" in reason


def test_pools_in_unlike_memory_go_over_sockets_and_say_so_on_one_machine() -> None:
    assert choose_transport(local(device="GPU-a"), HERE) == (
        "tcp", "mapped: our pool is in GPU-a, the peer's in host memory",
    )  # fmt: skip
    assert choose_transport(local(device="GPU-a"), THERE) == ("tcp", "")


def test_tls_leaves_only_what_can_be_encrypted() -> None:
    ours = local(device="GPU-a", tls=True)
    assert offered(ours) == ("mapped", "tcp")
    kind, reason = choose_transport(ours, at(THERE, device="GPU-b"))
    assert kind == "tcp"
    assert reason == "nccl: it cannot be encrypted, and TLS is configured"


@pytest.mark.parametrize(
    ("transport", "device", "peer", "why"),
    [
        ("mapped", "", THERE, "mapped: the peer is on another host"),
        ("nccl", "", THERE, "nccl: our pool is in host memory"),
        ("nccl", "GPU-a", at(HERE, device="GPU-a"), "nccl: both pools are on one GPU"),
        ("nccl", "GPU-a", at(THERE, device="GPU-b", transports=()), "nccl: the peer is of an earlier release"),
        ("tcp", "", at(THERE, tcp_address=""), "tcp: the peer listens only on a unix socket"),
    ],
)
def test_a_named_transport_is_never_replaced(transport: str, device: str, peer: Peer, why: str) -> None:
    with pytest.raises(LinkRefused) as refused:
        choose_transport(local(transport, device), peer)
    assert why in refused.value.message
    assert "decode-0" in refused.value.message


def test_an_earlier_release_is_reached_by_what_it_knows() -> None:
    before = at(THERE, transports=(), machine_id="")
    assert choose_transport(local(), before) == ("tcp", "")
    assert choose_transport(local(device="GPU-a"), at(before, device="GPU-b")).kind == "tcp"
    assert "process_group" in offered(local()), "what it chooses across hosts"
