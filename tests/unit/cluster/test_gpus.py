"""What a spec asks of this machine's GPUs is checked before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from cluster.devices import Gpu, GpuReport
from cluster.spec.gpu_probe import report
from cluster.spec.gpus import probe_gpus, resolve_devices
from cluster.spec.loader import load_spec
from kvtransfer.transports.host_support import HostSupport
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

GIB = 1 << 30


def gpus(count: int, cuda: str | None = "12.8") -> GpuReport:
    found = tuple(Gpu(ordinal=each, name="H200", memory_bytes=139 * GIB, uuid=f"GPU-{each}") for each in range(count))
    return GpuReport(torch="2.13.0", cuda=cuda, gpus=found)


def make_spec(control: dict[str, Any] | None = None, **model: Any) -> ClusterSpec:
    tree = {"engine": {"device": "cuda"}} | model
    return ClusterSpec.model_validate({"models": [tree], "control": {"backend": "subprocess"} | (control or {})})


def refusal(spec: ClusterSpec, found: GpuReport) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        resolve_devices(spec, lambda: found)
    assert refused.value.message.startswith(f"{refused.value.field}: ")
    return refused.value


def test_workers_on_the_cpu_or_on_rays_nodes_need_no_probe() -> None:
    def probe() -> GpuReport:
        raise AssertionError("probed")

    assert resolve_devices(ClusterSpec(), probe) == ()
    assert resolve_devices(make_spec({"backend": "ray", "ray_address": "auto"}), probe) == ()


@pytest.mark.parametrize(
    ("control", "model", "ordinals"),
    [
        ({}, {}, (0, 1, 2)),
        ({"devices": [2, 1]}, {}, (2, 1)),
        ({"devices": [0]}, {"engine": {"device": "cuda", "device_share": 0.45}}, (0, )),
        ({"devices": [1]}, {"engine": {}, "decode": {"engine": {"device": "cuda:1"}}}, (1,)),
    ],
)  # fmt: skip
def test_the_gpus_of_the_workers_are_all_or_those_of_the_spec(
    control: dict[str, Any], model: dict[str, Any], ordinals: tuple[int, ...]
) -> None:
    assert resolve_devices(make_spec(control, **model), lambda: gpus(3)) == ordinals


@pytest.mark.parametrize(
    ("spec", "found", "field", "text"),
    [
        (make_spec(), gpus(0, cuda=None), "engine.device", "expected a CUDA build of torch"),
        (make_spec(), gpus(0), "engine.device", "finds none"),
        (make_spec(decode={"workers": 2}), gpus(2), "engine.device", "needs a share of 1 GPU .*cuda:0: 0, cuda:1: 0"),
        (make_spec(decode={"tp": 4}), gpus(4), "engine.device", "needs a share of 4 GPUs"),
        (
            make_spec(engine={"device": "cuda", "device_share": 0.6}),
            gpus(1), "engine.device", r"device_share 0\.6\), and these shares are free: cuda:0: 0\.4",
        ),
        (make_spec({"devices": [0, 7]}), gpus(2), "control.devices", r"GPUs \(cuda:0, cuda:1\), got 7"),
        (
            make_spec(decode={"engine": {"device": "cuda:5"}}, prefill={"workers": 0}),
            gpus(2), "engine.device", "cuda:5",
        ),
        (
            make_spec(engine={}, decode={"engine": {"device": "cuda"}}),
            gpus(0), "decode.engine.device", "finds none",
        ),
    ],
)  # fmt: skip
def test_what_the_gpus_cannot_hold_is_refused_by_its_field(
    spec: ClusterSpec, found: GpuReport, field: str, text: str
) -> None:
    error = refusal(spec, found)
    assert error.field == field
    with pytest.raises(ConfigError, match=text):
        raise error


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"models.0.engine.device_share": 1.5}, "models.0.engine.device_share: expected less than or equal to 1"),
        ({"models.0.prefill.engine.device_share": 0}, "models.0.prefill.engine.device_share: expected greater than 0"),
        ({"control.devices": [0]}, "control.devices: expected together with engine.device cuda"),
        (
            {"control.devices": [1, 1], "models.0.engine.device": "cuda"},
            "control.devices: expected different ordinals",
        ),
        (
            {"control.devices": [1], "control.ray_address": "auto", "models.0.engine.device": "cuda"},
            "set CUDA_VISIBLE_DEVICES for `ray start`",
        ),
        ({"models.0.decode.engine.device": "cuda:1"}, "decode.engine.device: expected cuda with control.backend ray"),
        (
            {"control.backend": "subprocess", "models.0.engine.device": "cuda:1", "models.0.decode.tp": 2},
            r"engine.device: expected cuda for workers of 2 ranks \(decode.tp\)",
        ),
        (
            {"models.0.engine.device": "cuda", "models.0.engine.device_share": 0.5, "models.0.decode.tp": 2},
            r"engine.device_share: expected more than 0.5 for workers of 2 ranks \(decode.tp\) with control.b",
        ),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_no_spec(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_spec(None, flags, {})


class FakeCuda:
    """`torch.cuda` of a machine whose GPU 0 reads GPU 1, and not the other way round."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, device: int, /) -> Any:
        return SimpleNamespace(name="H200", total_memory=139 * GIB, uuid=f"uuid-{device}")

    def can_device_access_peer(self, device: int, peer_device: int, /) -> bool:
        return device < peer_device


def test_the_probe_reports_each_gpu_and_who_reads_whom() -> None:
    host = HostSupport(lambda kind: "not installed" if kind == "nixl" else "", lambda: True)
    found = report("2.13.0", "12.8", FakeCuda(), host)
    assert [(each.ordinal, each.name, each.uuid) for each in found.gpus] == [
        (0, "H200", "uuid-0"),
        (1, "H200", "uuid-1"),
    ]
    assert found.peers == {(0, 1)}
    assert (found.missing, found.rdma) == ({"nixl": "not installed"}, True)
    assert GpuReport.model_validate_json(found.model_dump_json()) == found


def test_the_probe_of_this_machine_agrees_with_torch() -> None:
    found = probe_gpus()
    assert (found.torch, found.cuda) == (torch.__version__, torch.version.cuda)
    assert len(found.gpus) == torch.cuda.device_count()
    assert ("nccl" in found.missing) == (not torch.distributed.is_nccl_available())
