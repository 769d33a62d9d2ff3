"""docs/security.md's table of fabrics: the chart renders what a row says, and refuses what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.transports.choice import ENCRYPTED, FASTEST_FIRST
from tandem.config.auth import is_loopback
from tandem.config.spec import ClusterSpec
from tandem.config.transfer import TransferSpec, TransportKind
from tests.unit.deploy.test_chart import cluster_spec, head_of
from tests.unit.deploy.test_chart_objects import containers, pods

Manifests = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Manifests]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"
GPUS = "cluster.models[0].engine.device=cuda,node.gpus=2,node.replicas=2,node.resources.requests.cpu=8"
VALKEY = "redis.mode=valkey,redis.valkey.auth.existingSecret=v"
PLAIN = f"{GPUS},{VALKEY},cluster.security.allow_plaintext=true"
SETTINGS = {
    "one pod: shared memory, CUDA IPC": "",
    "pods over TCP, with TLS": f"{GPUS},{VALKEY},redis.valkey.tls.existingSecret=vt,tls.internal.existingSecret=certs",
    "pods over NCCL": f"{PLAIN},cluster.transfer.transport=nccl",
    "pods over RDMA (NIXL)": f"{PLAIN},node.rdma.resource=rdma/hca,cluster.transfer.transport=nixl",
    "pods over a CNI that encrypts (WireGuard)": f"{PLAIN},cluster.transfer.transport=tcp",
}


def table() -> dict[str, list[str]]:
    section = PAGE.read_text().split("## What is encrypted, by fabric")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {fabric: cells for fabric, *cells in rows[2:]}


def planes(manifests: Manifests) -> dict[str, str]:
    """How each plane is protected, in the table's words."""
    spec = cluster_spec(manifests)
    encrypted = spec.security.tls is not None
    alone = is_loopback(spec.control.admin_host)
    assert alone == is_loopback(spec.transfer.bind_host)
    token = manifests["RayCluster", "test-tandem"]["spec"]["authOptions"]["mode"] == "token"
    return {
        "control": "loopback" if alone else "mutual TLS" if encrypted else "plain text",
        "KV": "memory" if alone else "TLS between pods" if encrypted else "plain text",
        "Ray": "token" if alone and token else "token, plain text" if token else "plain text",
        "Redis": redis_plane(manifests, spec),
    }


def redis_plane(manifests: Manifests, spec: ClusterSpec) -> str:
    if spec.redis.mode == "embedded":
        return "Unix socket"
    variables = head_of(manifests)["template"]["spec"]["containers"][0]["env"]
    (url,) = [each["value"] for each in variables if each["name"] == "TANDEM_REDIS_URL"]
    return "TLS" if url.startswith("rediss://") else "plain text"


def test_the_table_has_the_fabrics_of_this_test() -> None:
    assert list(table()) == list(SETTINGS)


@pytest.mark.parametrize("fabric", SETTINGS)
def test_a_fabric_is_protected_as_the_table_says(render: Render, fabric: str) -> None:
    given, *said, _ = table()[fabric]
    arguments = ("--set", SETTINGS[fabric]) if SETTINGS[fabric] else ()
    found = planes(render(*arguments))
    for cell, (plane, protection) in zip(said, found.items(), strict=True):
        assert cell.startswith(protection), plane
    for path in re.findall(r"`([\w.]+)", given):
        assert f"{path}=" in SETTINGS[fabric] or f"{path}." in SETTINGS[fabric]


@pytest.mark.parametrize("fabric", SETTINGS)
def test_a_fabric_refuses_what_the_table_says(refusal: Callable[..., str], fabric: str) -> None:
    *_, refused = table()[fabric]
    found = re.findall(r"`([\w.]+): ([^`]*)`", refused)
    assert bool(found) == bool(SETTINGS[fabric])
    for path, value in found:
        said = refusal("--set", f"{SETTINGS[fabric]},{path}={value.strip(chr(34))}")
        assert re.search(r": [a-z]\w*(\.\w+|\[\d+\])*: expected ", said), said


@pytest.mark.parametrize("fabric", SETTINGS)
def test_clients_have_tls_on_every_fabric_by_one_switch(render: Render, fabric: str) -> None:
    """Everything that calls a router then does so over TLS."""
    edge = "tls.edge.certManager.enabled=true,tls.edge.certManager.issuerRef.name=ca"
    watching = "monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true"
    manifests = render("--set", ",".join(filter(None, (SETTINGS[fabric], edge, watching))))
    assert cluster_spec(manifests).router.tls is not None
    assert ("Certificate", "test-tandem-edge") in manifests
    probes = [
        each[kind]["httpGet"]["scheme"]
        for _, pod in pods(manifests)
        for each in containers(pod)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        if "httpGet" in each.get(kind, {})
    ]
    assert set(probes) == {"HTTPS"}
    scraped = manifests["PodMonitor", "test-tandem"]["spec"]["podMetricsEndpoints"]
    scraped += manifests["ServiceMonitor", "test-tandem"]["spec"]["endpoints"]
    assert {each["scheme"] for each in scraped} == {"https"}
    tested = manifests["Pod", "test-tandem-test-completion"]["spec"]["containers"][0]["args"][0]
    assert "https://" in tested
    assert "http://" not in tested
    ports = [port for kind in ("http", "grpc") for port in manifests["Service", f"test-tandem-{kind}"]["spec"]["ports"]]
    assert {port.get("appProtocol") for port in ports} == {"https"}


def test_no_transport_that_cannot_encrypt_is_chosen_with_tls() -> None:
    """The table's reason: of those that `auto` takes, these encrypt or leave no machine."""
    assert {kind for kind in FASTEST_FIRST if TransferSpec(transport=TransportKind(kind)).can_encrypt} == set(ENCRYPTED)
