"""What `tandem doctor` says about the GPUs of a machine, on machines that are not there."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cli.commands.doctor import devices
from cluster.devices import Gpu, GpuReport
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError


def machine(*peers: tuple[int, int], gpus: int = 2) -> GpuReport:
    found = (Gpu(ordinal=each, name="NVIDIA H200", memory_bytes=139 << 30, uuid=f"u{each}") for each in range(gpus))
    return GpuReport(torch="2.13.0", cuda="12.8" if gpus else None, gpus=tuple(found), peers=frozenset(peers))


def lines(report: GpuReport, **transfer: Any) -> list[str]:
    engine = {"device": "cuda", "device_share": 0.45} if report.gpus else {}
    spec = ClusterSpec.model_validate({"models": [{"engine": engine}], "transfer": transfer})
    return [each.strip() for each in devices(spec, lambda: report).splitlines()]


def test_each_gpu_has_a_line_and_gpus_that_read_each_other_use_mapped() -> None:
    said = lines(machine((0, 1), (1, 0)))
    assert said[0].startswith("torch 2.13.0 (CUDA 12.8), 2 GPUs, ")
    assert said[0].endswith("workers on cuda")
    assert said[1:] == [
        "cuda:0  NVIDIA H200, 142336 MiB, u0",
        "cuda:1  NVIDIA H200, 142336 MiB, u1",
        "cuda:0  reads the memory of cuda:1",
        "cuda:1  reads the memory of cuda:0",
        "KV between workers on one GPU: mapped",
        "KV between GPUs (cuda:0 to cuda:1, cuda:1 to cuda:0): mapped",
        "KV to another host: nccl",
    ]


def test_gpus_without_peer_access_are_told_with_the_reason() -> None:
    said = lines(machine((0, 1)))  # GPU 0 reads GPU 1, so KV goes mapped from 1 to 0 only
    assert "cuda:1  reads the memory of no other GPU" in said
    assert "KV between GPUs (cuda:1 to cuda:0): mapped" in said
    (other,) = [each for each in said if each.startswith("KV between GPUs (cuda:0 to cuda:1)")]
    assert "nccl (mapped: GPU u1 cannot read the memory of GPU u0" in other


@pytest.mark.parametrize(
    ("transfer", "path"),
    [
        ({"tls": {"cert": "c", "key": "k", "ca": "a"}}, "KV to another host: tcp"),
        ({"transport": "tcp"}, "KV between workers on one GPU: tcp"),
        (
            {"transport": "mapped"},
            "KV to another host: refused (transport: no link to a worker is possible: mapped: the peer is on",
        ),
    ],
)
def test_the_paths_follow_the_configured_transport(transfer: dict[str, Any], path: str) -> None:
    assert any(each.startswith(path) for each in lines(machine(gpus=1), **transfer))


def test_a_machine_without_gpus_says_so_and_names_no_paths() -> None:
    (said,) = lines(machine(gpus=0))
    assert said.startswith("torch 2.13.0 (no CUDA), no GPU, ")
    assert said.endswith("workers on cpu")


def test_what_cannot_start_is_refused() -> None:
    spec = ClusterSpec.model_validate({"models": [{"engine": {"device": "cuda"}, "decode": {"workers": 2}}]})
    with pytest.raises(ConfigError, match="needs a share of 1 GPU"):
        devices(spec, machine)
