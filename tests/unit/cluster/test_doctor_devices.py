"""What `tandem doctor` says about the GPUs of a machine, on machines that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.cli.commands.doctor import Unchecked, devices, run_doctor, transfer
from cluster.devices import Gpu, GpuReport
from cluster.spec.resolve import free_ports
from tandem.config.spec import ClusterSpec
from tandem.config.transfer import TransferSpec
from tandem.errors import ConfigError
from tandem.testing.models import write_tiny_llama


def machine(*peers: tuple[int, int], gpus: int = 2) -> GpuReport:
    found = (Gpu(ordinal=each, name="NVIDIA H200", memory_bytes=139 << 30, uuid=f"u{each}") for each in range(gpus))
    return GpuReport(torch="2.13.0", cuda="12.8" if gpus else None, gpus=tuple(found), peers=frozenset(peers))


def make_spec(
    device: str = "cuda", share: float = 0.45, control: dict[str, Any] | None = None, **transport: Any
) -> ClusterSpec:
    engine = {"device": device} | ({"device_share": share} if device != "cpu" else {})
    tree = {
        "models": [{"engine": engine}],
        "transfer": transport,
        "control": {"backend": "subprocess"} | (control or {}),
    }
    return ClusterSpec.model_validate(tree)


def lines(report: GpuReport, **transport: Any) -> list[str]:
    spec = make_spec("cuda" if report.gpus else "cpu", **transport)
    return [each.strip() for check in (devices, transfer) for each in check(spec, lambda: report).splitlines()]


def test_each_gpu_has_a_line_and_gpus_that_read_each_other_use_mapped() -> None:
    said = lines(machine((0, 1), (1, 0)))
    assert said[0].startswith("torch 2.13.0 (CUDA 12.8), 2 GPUs, ")
    assert said[0].endswith("workers on cuda")
    assert said[1:] == [
        "cuda:0  NVIDIA H200, 142336 MiB, u0",
        "cuda:1  NVIDIA H200, 142336 MiB, u1",
        "cuda:0  reads the memory of cuda:1",
        "cuda:1  reads the memory of cuda:0",
        "auto, not encrypted across hosts",
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
        (
            {"transport": "tcp"},
            "KV between workers on one GPU: tcp (mapped is faster here, and transfer.transport is tcp",
        ),
        ({"transport": "tcp"}, "KV to another host: tcp (nccl is faster here"),
        ({"transport": "mapped"}, "KV between workers on one GPU: mapped"),
    ],
)
def test_the_paths_follow_the_configured_transport(transfer: dict[str, Any], path: str) -> None:
    assert any(each.startswith(path) for each in lines(machine(gpus=1), **transfer))


def test_a_path_that_is_refused_and_unused_is_left_out() -> None:
    assert not [each for each in lines(machine(gpus=1), transport="mapped") if "another host" in each]


RAY = {"backend": "ray", "ray_address": "auto"}


@pytest.mark.parametrize(
    ("spec", "report", "refused"),
    [
        (
            make_spec(transport="mapped"),  # one worker on each GPU
            machine(),
            "KV between GPUs (cuda:0 to cuda:1): refused (transport: no link to a worker is possible: mapped: GPU u1 "
            "cannot read the memory of GPU u0",
        ),
        (
            make_spec(transport="nccl"),
            machine(gpus=1),
            "KV between workers on one GPU: refused (transport: no link to a worker is possible: nccl: both pools are",
        ),
        (
            make_spec(share=1, control=RAY, transport="mapped"),
            machine(gpus=1),
            "KV to another host: refused (transport: no link to a worker is possible: mapped: the peer is on another",
        ),
        (
            make_spec(share=1, control={"backend": "ray"}, transport="mapped"),  # Ray chooses which GPU
            machine((0, 1)),
            "KV between GPUs (cuda:0 to cuda:1): refused",
        ),
    ],
)
def test_a_path_that_is_refused_and_used_fails_the_check(spec: ClusterSpec, report: GpuReport, refused: str) -> None:
    with pytest.raises(ConfigError) as error:
        transfer(spec, lambda: report)
    assert error.value.field == "transfer.transport"
    said = error.value.message.splitlines()
    assert said[0].startswith("transfer.transport: expected one that works between all workers, got ")
    assert said[0].endswith(": set auto, or mend what is refused:")
    assert said[1].strip().startswith(refused)
    assert transfer(spec.model_copy(update={"transfer": TransferSpec()}), lambda: report), "as it says"


@pytest.mark.parametrize(("transport", "passes"), [("nccl", False), ("auto", True)])
def test_doctor_exits_non_zero_where_a_path_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str, *, passes: bool
) -> None:
    config = tmp_path / "cluster.yaml"
    source = write_tiny_llama(tmp_path / "tiny")
    ports = free_ports("127.0.0.1", "127.0.0.1", "127.0.0.1")
    config.write_text(
        f"models: [{{source: {source}, engine: {{device: cuda, device_share: 0.45}}}}]\n"
        f"control: {{backend: subprocess, admin_port: {ports[0]}}}\n"
        f"router: {{http_port: {ports[1]}, grpc_port: {ports[2]}}}\ntransfer: {{transport: {transport}}}\n"
    )
    assert run_doctor(config, None, probe=lambda: machine(gpus=1)) == (0 if passes else 1)
    said = capsys.readouterr().out
    assert ("✗ transfer: transfer.transport: expected one that works" in said) == (not passes)
    assert ("KV between workers on one GPU: mapped" in said) == passes


@pytest.mark.parametrize(("transport", "reason"), [("nccl", "torch has no NCCL"), ("nixl", "nixl is not installed")])
def test_a_named_transport_without_its_library_is_refused(transport: str, reason: str) -> None:
    report = machine((0, 1), (1, 0))
    missing = report.model_copy(update={"missing": {transport: reason}})
    said = transfer(make_spec(transport=transport), lambda: report)
    assert f"KV between GPUs (cuda:0 to cuda:1, cuda:1 to cuda:0): {transport}" in said
    with pytest.raises(ConfigError, match=rf"^transfer\.transport: {transport}: {reason}, or set another") as refused:
        transfer(make_spec(transport=transport), lambda: missing)
    assert refused.value.field == "transfer.transport"


def test_what_is_missing_is_not_chosen_by_auto() -> None:
    away = [each for each in lines(machine().model_copy(update={"missing": {"nccl": "x"}})) if "another host" in each]
    assert away == ["KV to another host: tcp (nccl: x)"]
    away = [each for each in lines(machine().model_copy(update={"rdma": True})) if "another host" in each]
    assert away == ["KV to another host: nixl"]


def test_paths_are_not_checked_where_the_workers_do_not_fit() -> None:
    with pytest.raises(Unchecked, match="between GPUs not checked"):
        transfer(make_spec(share=1), lambda: machine(gpus=1))


def test_a_machine_without_gpus_says_so_and_names_no_paths() -> None:
    said, transport = lines(machine(gpus=0))
    assert said.startswith("torch 2.13.0 (no CUDA), no GPU, ")
    assert said.endswith("workers on cpu")
    assert transport == "auto, not encrypted across hosts"


def test_what_cannot_start_is_refused() -> None:
    spec = ClusterSpec.model_validate({"models": [{"engine": {"device": "cuda"}, "decode": {"workers": 2}}]})
    with pytest.raises(ConfigError, match="needs a share of 1 GPU"):
        devices(spec, machine)
