"""Which transport a link gets: the fastest that works, and why it is not a faster one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.distributed

from kvtransfer.connection.handshake import LinkRefused, LocalRank
from kvtransfer.control import AttachPool, DeviceMemory, Peer, WireLayout
from kvtransfer.pool.pool import PoolMap
from kvtransfer.transports import choice
from kvtransfer.transports.choice import TransportChoice, check_available
from kvtransfer.transports.host_support import HostSupport, has_rdma, why_no_nccl, why_no_nixl
from tandem.errors import ConfigError
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


NO_NIXL = {"nixl": "nixl is not installed: pip install 'tandem-serve[nixl]'"}
NO_NCCL = {"nccl": "torch 2.13.0+cpu has no NCCL: install a CUDA build of torch"}


def host(missing: Mapping[str, str] = {}, *, rdma: bool = False) -> HostSupport:
    return HostSupport(lambda kind: missing.get(kind, ""), lambda: rdma)


def choose_transport(
    ours: LocalRank, peer: Peer, support: HostSupport | None = None, failed: Mapping[str, str] = {}
) -> TransportChoice:
    return choice.choose_transport(ours, peer, support or host(), failed)


def offered(ours: LocalRank, support: HostSupport | None = None) -> tuple[str, ...]:
    return choice.offered(ours, support or host())


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


def test_rdma_comes_before_nccl_and_is_missed_where_the_peer_has_none() -> None:
    ours, peer = local(device="GPU-a"), at(THERE, device="GPU-b")
    rdma = host(rdma=True)
    assert choose_transport(ours, peer, rdma) == ("nixl", "")
    kind, reason = choose_transport(ours, at(peer, transports=("mapped", "nccl", "tcp")), rdma)
    assert kind == "nccl"
    assert reason.startswith("nixl: the peer accepts only mapped, nccl, tcp: configure and install the same")


def test_rdma_without_its_library_says_what_to_install() -> None:
    kind, reason = choose_transport(local(), THERE, host(NO_NIXL, rdma=True))
    assert kind == "tcp"
    assert "pip install 'tandem-serve[nixl]'" in reason


def test_a_torch_without_nccl_is_seen_before_a_link_is_opened() -> None:
    ours, peer = local(device="GPU-a"), at(THERE, device="GPU-b")
    assert "nccl" in offered(ours)
    assert "nccl" not in offered(ours, host(NO_NCCL))
    kind, reason = choose_transport(ours, peer, host(NO_NCCL))
    assert kind == "tcp"
    assert reason == f"nccl: {NO_NCCL['nccl']}"


@pytest.mark.parametrize(("transport", "missing"), [("nccl", NO_NCCL), ("nixl", NO_NIXL)])
def test_a_named_transport_without_its_library_is_not_offered(transport: str, missing: dict[str, str]) -> None:
    ours = local(transport, "GPU-a")
    assert offered(ours) == (transport,)
    assert offered(ours, host(missing)) == ()
    with pytest.raises(LinkRefused, match=re.escape(missing[transport])):
        choose_transport(ours, at(THERE, device="GPU-b"), host(missing))


def test_the_libraries_of_this_process_are_those_that_it_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    assert (why_no_nccl() == "") == has_nccl
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_nixl").mkdir()
    (tmp_path / "broken_nixl" / "_api.py").write_text("raise ImportError('libucp.so.0: cannot open')")
    assert "ImportError: libucp.so.0: cannot open): pip install --force-reinstall" in why_no_nixl("broken_nixl")
    (tmp_path / "whole_nixl").mkdir()
    (tmp_path / "whole_nixl" / "_api.py").touch()
    assert why_no_nixl("whole_nixl") == ""
    assert why_no_nixl("no_nixl").endswith("is not installed: pip install 'tandem-serve[nixl]'")


@pytest.mark.skipif(why_no_nccl() == "", reason="this torch has NCCL")
def test_a_rank_on_a_gpu_refuses_to_start_without_nccl() -> None:
    check_available("nccl", on_gpu=False)  # over gloo, in tests
    check_available("auto", on_gpu=True)
    with pytest.raises(ConfigError, match=r"^transfer\.transport: nccl: torch .* has no NCCL") as refused:
        check_available("nccl", on_gpu=True)
    assert refused.value.field == "transfer.transport"


def test_an_rdma_device_counts_only_if_this_process_can_open_it(tmp_path: Path) -> None:
    devices = tmp_path / "infiniband"
    assert not has_rdma(devices), "a pod without a device of the plugin"
    has_rdma.cache_clear()
    devices.mkdir()
    (devices / "rdma_cm").touch()
    (devices / "uverbs0").symlink_to(tmp_path / "missing")
    assert not has_rdma(devices), "one that cannot be opened"
    has_rdma.cache_clear()
    (devices / "uverbs1").touch()
    assert has_rdma(devices)


def test_auto_avoids_what_failed_to_open_and_says_so() -> None:
    ours, peer = local(device="GPU-a"), at(THERE, device="GPU-b")
    assert choose_transport(ours, peer, failed={"nccl": "2 openings failed"}) == ("tcp", "nccl: 2 openings failed")
    everything = dict.fromkeys(ALL, "2 openings failed")
    assert choose_transport(ours, peer, failed=everything).kind == "nccl", "with nothing left, it begins again"
    with pytest.raises(LinkRefused, match="is possible: tcp: the peer listens only on a unix socket"):
        choose_transport(local("tcp"), at(THERE, tcp_address=""), failed=everything)


@pytest.mark.parametrize(
    ("ours", "peer", "support", "reason"),
    [
        (local("tcp"), at(HERE, transports=("tcp",), mapped_path=""), host(), "mapped is faster here"),
        (local("tcp"), at(THERE, transports=("tcp",)), host(rdma=True), "nixl is faster here"),
        (local("tcp"), at(THERE, transports=("tcp",)), host(NO_NIXL, rdma=True), NO_NIXL["nixl"]),
        (local("tcp", "GPU-a"), at(THERE, device="GPU-b", transports=("tcp",)), host(), "nccl is faster here"),
        (local("nccl", "GPU-a", reads=("GPU-b",)), at(HERE, device="GPU-b"), host(), "mapped is faster here"),
        (local("process_group"), at(THERE, transports=("process_group",)), host(), "tcp is faster here"),
    ],
)
def test_a_named_transport_that_is_slower_than_these_hosts_allow_says_so(
    ours: LocalRank, peer: Peer, support: HostSupport, reason: str
) -> None:
    kind, told = choose_transport(ours, peer, support)
    assert kind == ours.attach.transport
    assert reason in told
    if "is faster here" in reason:
        assert told.endswith(f"transfer.transport is {kind}: set it to auto")


@pytest.mark.parametrize(
    ("ours", "peer"),
    [
        (local("tcp"), at(THERE, transports=("tcp",))),
        (local("mapped"), at(HERE, transports=("mapped",))),
        (local("nccl", "GPU-a"), at(THERE, device="GPU-b", transports=("nccl",))),
        (local("tcp", "GPU-a"), at(THERE, transports=("tcp",))),
    ],
)
def test_a_named_transport_that_is_the_fastest_here_says_nothing(ours: LocalRank, peer: Peer) -> None:
    assert choose_transport(ours, peer) == (ours.attach.transport, "")


def test_two_containers_of_a_machine_are_told_apart_from_two_machines() -> None:
    kind, reason = choose_transport(local(), at(HERE, host_id="container"))
    assert kind == "tcp"
    assert "in another container or of another user: run both in one pod" in reason


def test_pools_in_unlike_memory_go_over_sockets_and_say_so_on_one_machine() -> None:
    assert choose_transport(local(device="GPU-a"), HERE) == (
        "tcp", "mapped: our pool is in GPU-a, the peer's in host memory: set the same engine.device for both roles",
    )  # fmt: skip
    assert choose_transport(local(device="GPU-a"), THERE) == ("tcp", "")


def test_tls_leaves_only_what_can_be_encrypted() -> None:
    ours = local(device="GPU-a", tls=True)
    assert offered(ours) == ("mapped", "tcp")
    kind, reason = choose_transport(ours, at(THERE, device="GPU-b"))
    assert kind == "tcp"
    assert reason.startswith("nccl: it cannot be encrypted, and TLS is configured: if the network between the hosts")
    assert "unset transfer.tls and security.tls" in reason


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
