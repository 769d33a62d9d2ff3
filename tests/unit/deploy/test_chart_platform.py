"""What a platform team gives the chart beside the cluster's spec: machines, a gateway, a registry, alerts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "examples"

Manifests = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Manifests]

GPU = (
    "cluster.models[0].engine.device=cuda,redis.mode=external,redis.external.existingSecret=x,"
    "cluster.security.allow_plaintext=true,node.onHead=false,"
)


def values(name: str) -> tuple[str, str]:
    return "--values", str(EXAMPLES / f"{name}.yaml")


def cluster_of(manifests: Manifests) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"])
    return spec


@pytest.mark.parametrize(
    ("nodes", "gpus", "prefill", "decode", "misfit"),
    [
        (2, 6, (2, 4), (1, 4), "cluster.models[0].decode has a worker of 4 GPUs"),  # 12 of 12 GPUs, but 2 left on each
        (3, 6, (2, 4), (1, 4), ""),
        (3, 6, (3, 4), (3, 2), ""),
        (3, 6, (3, 4), (2, 3), "cluster.models[0].decode has a worker of 3 GPUs"),
        (2, 8, (2, 2), (3, 4), ""),
        (2, 8, (4, 2), (2, 4), ""),
        (2, 8, (1, 3), (2, 5), ""),
        (2, 8, (2, 3), (2, 5), ""),
        (2, 8, (2, 5), (1, 4), "cluster.models[0].decode has a worker of 4 GPUs"),
    ],
)
def test_workers_that_fit_no_node_are_refused(
    render: Render,
    refusal: Callable[..., str],
    nodes: int,
    gpus: int,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    misfit: str,
) -> None:
    pools = [
        f"cluster.models[0].{role}.{key}={value}"
        for role, pool in (("prefill", prefill), ("decode", decode))
        for key, value in zip(("workers", "tp"), pool, strict=True)
    ]
    room = "node.resources.requests.cpu=64,node.resources.limits.memory=512Gi"
    settings = ",".join([GPU + f"node.replicas={nodes},node.gpus={gpus},{room}", *pools])
    if misfit:
        assert f"node.gpus: {misfit} that fits on no node" in refusal("--set", settings)
    else:
        assert cluster_of(render("--set", settings))["models"][0]["decode"] == {"workers": decode[0], "tp": decode[1]}


def test_an_autoscaler_may_not_ask_for_more_than_all_nodes_have(render: Render, refusal: Callable[..., str]) -> None:
    settings = GPU + "node.replicas=2,node.maxReplicas=4,node.gpus=2,cluster.autoscaler.enabled=true"
    assert cluster_of(render("--set", f"{settings},cluster.autoscaler.max_workers=8"))["autoscaler"]["max_workers"] == 8
    said = refusal("--set", f"{settings},cluster.autoscaler.max_workers=9")
    assert "cluster.autoscaler.max_workers: expected at most what 4 nodes can hold" in said


def test_a_gateway_checks_the_certificate_of_the_routers_that_it_calls(render: Render) -> None:
    settings = "gateway.enabled=true,gateway.parentRefs[0].name=g,tls.edge.existingSecret=edge,"
    settings += "cluster.security.auth.mode=none,"
    policy = render("--set", settings + "gateway.backendTls.caConfigMap=ca")["BackendTLSPolicy", "test-tandem"]["spec"]
    assert policy == {
        "targetRefs": [{"group": "", "kind": "Service", "name": "test-tandem-http"}],
        "validation": {
            "hostname": "test-tandem-http.serving.svc",
            "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "ca"}],
        },
    }
    both = "gateway.hostnames[0]=a,gateway.grpcHostnames[0]=b,gateway.backendTls.wellKnownCas=true,"
    manifests = render("--set", settings + both + "gateway.backendTls.hostname=llm.example.com")
    policy = manifests["BackendTLSPolicy", "test-tandem"]["spec"]
    assert [each["name"] for each in policy["targetRefs"]] == ["test-tandem-http", "test-tandem-grpc"]
    assert policy["validation"] == {"hostname": "llm.example.com", "wellKnownCACertificates": "System"}
    assert ("BackendTLSPolicy", "test-tandem") not in render(*values("two-racks"))


def test_releases_share_a_route_by_weight(render: Render, refusal: Callable[..., str]) -> None:
    settings = (
        "gateway.enabled=true,gateway.parentRefs[0].name=g,cluster.security.auth.mode=none,cluster.router.replicas=2,"
        "gateway.weight=90,gateway.backends[0].release=green,gateway.backends[0].weight=10,"
    )
    for routers, green in ((1, [(8000, 10000)]), (2, [(8000, 5000), (8001, 5000)])):
        manifests = render("--set", f"{settings}gateway.backends[0].routers={routers}")
        (rule,) = manifests["HTTPRoute", "test-tandem"]["spec"]["rules"]
        assert [(each["name"], each["port"], each["weight"]) for each in rule["backendRefs"]] == [
            ("test-tandem-http", 8000, 45000),
            ("test-tandem-http", 8001, 45000),
            *(("green-tandem-http", *each) for each in green),
        ]
    tls = "tls.edge.existingSecret=edge,gateway.backendTls.wellKnownCas=true"
    assert "gateway.backendTls.hostname: expected a name" in refusal("--set", settings + tls)
    tls += ",gateway.backendTls.hostname=llm.example.com"
    policy = render("--set", settings + tls)["BackendTLSPolicy", "test-tandem"]["spec"]
    assert [each["name"] for each in policy["targetRefs"]] == ["test-tandem-http", "green-tandem-http"]


def test_a_gateway_without_hosts_of_grpc_routes_http_only(render: Render) -> None:
    settings = "gateway.enabled=true,gateway.parentRefs[0].name=g,cluster.security.auth.mode=none"
    assert [kind for kind, _ in render("--set", settings) if "Route" in kind] == ["HTTPRoute"]


def test_alerts_name_the_release_and_where_their_runbooks_are(render: Render) -> None:
    settings = (
        "monitoring.prometheusRule.enabled=true,monitoring.prometheusRule.runbookUrl=https://docs.example/runbooks"
    )
    manifests = render("--set", settings)
    rules = {name: manifest for (kind, name), manifest in manifests.items() if kind == "PrometheusRule"}
    assert sorted(rules) == ["test-tandem-pods", "test-tandem-tandem"]
    text = yaml.safe_dump(rules)
    assert "RELEASE_" not in text
    assert 'namespace="serving"' in text
    assert 'pod=~"test-tandem-head-.*"' in text
    assert "https://docs.example/runbooks/TandemNoHeadPod.md" in text
    assert "docs/runbooks" not in text


def test_all_images_come_from_one_registry_if_told(render: Render) -> None:
    settings = "global.imageRegistry=registry.example:5000/mirror,image.repository=ghcr.io/acme/tandem,image.tag=v2"
    manifests = render(*values("valkey"), "--set", settings)
    assert images_of(manifests) == {
        "registry.example:5000/mirror/acme/tandem:v2",
        "registry.example:5000/mirror/valkey/valkey:9.1.2",
        "registry.example:5000/mirror/curlimages/curl:8.16.0",
    }
    digest = f"sha256:{'a' * 64}"
    assert f"r.example/tandem@{digest}" in images_of(
        render("--set", f"global.imageRegistry=r.example,image.digest={digest}")
    )


def images_of(manifests: Manifests) -> set[str]:
    return set(re.findall(r"^ *(?:- )?image: (\S+)$", yaml.safe_dump_all(manifests.values()), re.MULTILINE))


def test_pods_run_under_the_service_account_that_is_named(render: Render) -> None:
    manifests = render(*values("valkey"), "--set", "serviceAccount.name=mine")
    assert [kind for kind, _ in manifests if kind == "ServiceAccount"] == []
    text = yaml.safe_dump_all(manifests.values())
    assert set(re.findall(r"serviceAccountName: (\S+)", text)) == {"mine"}


def test_names_are_looked_up_where_the_values_say(render: Render) -> None:
    (rule,) = render(*values("openshift"))["NetworkPolicy", "test-tandem-names"]["spec"]["egress"]
    assert [each["port"] for each in rule["ports"]] == [5353, 5353]
    assert rule["to"][0]["podSelector"]["matchLabels"] == {"dns.operator.openshift.io/daemonset-dns": "default"}
    (rule,) = render()["NetworkPolicy", "test-tandem-names"]["spec"]["egress"]
    assert rule["to"][0]["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}


def test_openshift_chooses_who_the_pods_are(render: Render) -> None:
    text = yaml.safe_dump_all(render(*values("openshift")).values())
    assert "runAsUser" not in text
    assert "runAsGroup" not in text
    assert "fsGroup" not in text
    assert "runAsNonRoot: true" in text


@pytest.mark.parametrize(("url", "port"), [("https://id.example/keys", 443), ("https://id.example:8443/keys", 8443)])
def test_the_head_reaches_the_issuers_keys(render: Render, url: str, port: int) -> None:
    jwt = f"cluster.security.auth.jwt.jwks_url={url},cluster.security.auth.jwt.issuer=https://id.example"
    settings = f"{jwt},cluster.security.auth.jwt.audience=tandem,models.pull=false,models.existingClaim=weights"
    policy = render("--set", settings)["NetworkPolicy", "test-tandem-jwks"]["spec"]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": port}]}]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "head"
    assert ("NetworkPolicy", "test-tandem-jwks") not in render()


@pytest.mark.parametrize("on_head", [True, False])
def test_a_runtime_class_is_for_pods_with_workers(render: Render, *, on_head: bool) -> None:
    settings = f"{GPU}node.gpus=2,node.replicas=1,node.runtimeClassName=nvidia"
    if on_head:
        settings = settings.replace("node.onHead=false", "node.onHead=true")
    spec = render("--set", settings)["RayCluster", "test-tandem"]["spec"]
    pods = [each["template"]["spec"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    assert [pod.get("runtimeClassName") for pod in pods] == ["nvidia" if on_head else None, "nvidia"]


def test_a_load_balancer_may_have_a_class(render: Render) -> None:
    settings = "service.type=LoadBalancer,service.loadBalancerClass=a.example/lb,cluster.security.auth.mode=none"
    manifests = render("--set", settings)
    assert manifests["Service", "test-tandem-http"]["spec"]["loadBalancerClass"] == "a.example/lb"
    assert "loadBalancerClass" not in manifests["Service", "test-tandem-headless"]["spec"]


def test_dashboards_may_have_a_folder(render: Render) -> None:
    settings = "monitoring.dashboards.enabled=true,monitoring.dashboards.annotations.grafana_folder=Tandem"
    metadata = render("--set", settings)["ConfigMap", "test-tandem-dashboard-tandem-overview"]["metadata"]
    assert metadata["annotations"] == {"grafana_folder": "Tandem"}
