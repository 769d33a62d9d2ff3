"""How KV moves in the chart's examples: the code chooses what examples, documents and doctor say."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.commands.doctor import transfer
from cluster.devices import Gpu, GpuReport
from cluster.spec.kv_paths import kv_paths, used_paths
from kvtransfer.transports.choice import FASTEST_FIRST
from planner.devices import find_device, shipped_devices
from tandem.config.spec import ClusterSpec

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "helm" / "tandem" / "examples"
NO_NIXL = {"nixl": "nixl is not installed"}  # in the image, unless it is built with EXTRAS=nixl
TLS = ("--set", "tls.internal.existingSecret=certs,redis.valkey.tls.existingSecret=redis-certs")
RDMA = ("--set", "node.rdma.resource=rdma/hca")
Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]


def node(gpus: int, missing: dict[str, str], *, rdma: bool) -> GpuReport:
    """A node pod's GPUs, joined by NVLink."""
    found = (Gpu(ordinal=each, name="H100", memory_bytes=80 << 30, uuid=f"GPU-{each}") for each in range(gpus))
    peers = frozenset(permutations(range(gpus), 2))
    return GpuReport(torch="2.13.0", cuda="12.8", gpus=tuple(found), peers=peers, missing=missing, rdma=rdma)


def rendered(render: Render, name: str, *more: str) -> ClusterSpec:
    text = render("--values", str(EXAMPLES / f"{name}.yaml"), *more)["ConfigMap", "test-tandem"]["data"]["cluster.yaml"]
    completed = text.replace("${POD_IP}", "10.1.2.3").replace("${TANDEM_REDIS_URL}", "rediss://redis.example:6380/0")
    return ClusterSpec.model_validate(yaml.safe_load(completed))


def chosen(spec: ClusterSpec, report: GpuReport) -> tuple[set[str], str | None]:
    """The transports between GPUs of a node, and between nodes; None if the cluster has one node."""
    used = used_paths(spec, report)
    works, refused = kv_paths(spec.transfer.transport, report, used, encrypted=spec.security.tls is not None)
    assert not refused
    assert transfer(spec, lambda: report).splitlines()[1:] == [f"    {each}" for each in works], "as the doctor says"
    way = re.compile(r"(KV [a-zA-Z ]+?)(?: \(.*?\))?: (\w+)")
    kinds = {found[1]: found[2] for each in works if (found := way.match(each))}
    within = {kind for between, kind in kinds.items() if between != "KV to another host"}
    return within, kinds["KV to another host"] if used.to_another_host else None


def between_nodes(name: str) -> str | None:
    """The transport that the example's first lines name."""
    head = (EXAMPLES / f"{name}.yaml").read_text().partition("\nimage:")[0].replace("\n# ", " ")
    assert "between the GPUs of a node by CUDA IPC" in head or "between the GPUs by CUDA IPC" in head
    found = re.search(r"between nodes over the pods' network \((\w+)\)", head)
    return found[1] if found else None


@pytest.mark.parametrize(("name", "several"), [("gpu-node", False), ("two-racks", True)])
def test_the_paths_of_an_example_are_those_that_its_first_lines_name(
    render: Render, name: str, *, several: bool
) -> None:
    report = node(8, NO_NIXL, rdma=False)
    within, away = chosen(rendered(render, name), report)
    assert within == {"mapped"}
    assert away == between_nodes(name)
    assert (away is not None) == several


def test_the_deploy_page_names_the_paths_between_pods(render: Render) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    plain, encrypted = (
        chosen(rendered(render, "two-racks", *more), node(8, NO_NIXL, rdma=False))[1] for more in ((), TLS)
    )
    assert f"Between pods they move over the pods' network\n(`{plain}`, or `{encrypted}` with TLS)." in page
    rdma = rendered(render, "two-racks", *RDMA)
    assert chosen(rdma, node(8, {}, rdma=True))[1] == "nixl"
    assert chosen(rdma, node(8, {}, rdma=False))[1] == plain, "a device that cannot be opened"
    assert chosen(rdma, node(8, NO_NIXL, rdma=True))[1] == plain
    assert f"`cluster.transfer.transport: {rdma.transfer.transport}` between pods that have NIXL and can open" in page
    assert {plain, encrypted, "nixl"} == set(FASTEST_FIRST) - {"mapped"}


def test_the_planners_links_are_those_of_the_transports_that_it_names(render: Render) -> None:
    """Its link is that between hosts, of transports that `auto` takes there."""
    page = " ".join((ROOT / "docs" / "planning.md").read_text().split())
    stated = re.search(
        r"With `(\w+)` between GPUs, set `link` to .*?: the shipped figures are for `(\w+)` and `(\w+)`", page
    )
    assert stated is not None
    slow, *fast = stated.groups()
    spec = rendered(render, "two-racks")
    assert {chosen(spec, node(8, missing, rdma=rdma))[1] for missing, rdma in (({}, True), (NO_NIXL, False))} == {*fast}
    assert chosen(rendered(render, "two-racks", *TLS), node(8, {}, rdma=True))[1] == slow
    for name in shipped_devices():
        device = find_device(name)
        assert device.link.bytes_per_s <= device.fabric.bytes_per_s, "on the safe side within a host, over mapped"
