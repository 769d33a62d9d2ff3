"""What `pod` values add to the chart's pods, and the names that they may not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.deploy.test_chart import Manifest, Render, groups_of, values

NAME = "own-additions"


def pods(render: Render) -> dict[str, Manifest]:
    manifests = render(*values(NAME))
    head, node = groups_of(manifests)
    valkey = manifests["Deployment", "test-tandem-valkey"]["spec"]
    return {"head": head["template"], "node": node["template"], "valkey": valkey["template"]}


@pytest.mark.parametrize("component", ["head", "node"])
def test_a_pod_has_them_beside_the_charts_own(render: Render, component: str) -> None:
    pod = pods(render)[component]
    spec, metadata = pod["spec"], pod["metadata"]
    main, agent = spec["containers"]
    first, pull = spec["initContainers"]
    assert (main["name"], agent["name"]) == (f"ray-{component}", "agent")
    assert (first["name"], pull["name"]) == ("check-network", "pull-model-0")
    for container in (main, pull):  # a model is pulled through the same proxy
        assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]
        assert {"name": "HOME", "value": "/home/tandem"} in container["env"]
        assert container["envFrom"] == [{"configMapRef": {"name": "company-proxy"}}]
        assert "/etc/company" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"company-ca", "models"} <= {volume["name"] for volume in spec["volumes"]}
    assert metadata["labels"]["cost-center"] == "inference"
    assert metadata["labels"]["app.kubernetes.io/component"] == component
    assert ("role" in metadata["labels"]) == (component == "head")
    assert metadata["annotations"]["logs.example.com/parse"] == "json"
    assert ("checksum/config" in metadata["annotations"]) == (component == "head")
    assert (spec["priorityClassName"], spec["schedulerName"]) == ("production", "gang-scheduler")
    assert spec["hostAliases"] == [{"ip": "10.0.0.5", "hostnames": ["models.example.com"]}]
    assert spec["resourceClaims"] == [{"name": "nic", "resourceClaimTemplateName": "fast-nic"}]
    assert main["resources"]["claims"] == [{"name": "nic"}]


def test_each_pod_has_its_own(render: Render) -> None:
    spec = pods(render)["valkey"]["spec"]
    assert spec["priorityClassName"] == "production"
    assert "schedulerName" not in spec
    assert [each["name"] for each in spec["containers"]] == ["valkey"]


def test_further_objects_are_rendered_with_the_release(render: Render) -> None:
    assert render(*values(NAME))["ConfigMap", "test-notes"]["data"] == {"owner": "inference-team"}


@pytest.mark.parametrize(("host", "policy"), [("true", "ClusterFirstWithHostNet"), ("false", None)])
def test_a_pod_on_the_hosts_network_resolves_the_clusters_names(render: Render, host: str, policy: str | None) -> None:
    spec = groups_of(render("--set", f"node.pod.hostNetwork={host}"))[1]["template"]["spec"]
    assert spec.get("dnsPolicy") == policy
    given = groups_of(render("--set", f"node.pod.hostNetwork={host},node.pod.dnsPolicy=Default"))[1]
    assert given["template"]["spec"]["dnsPolicy"] == "Default"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("node.pod.env[0].name=HOME", "node.pod.env[0].name: expected another name than HOME"),
        ("head.pod.env[0].name=TANDEM_LOG_LEVEL", "head.pod.env[0].name: expected no TANDEM_ variable"),
        ("head.pod.env[0].name=REDIS_PASSWORD", "another name than REDIS_PASSWORD"),  # KubeRay refuses the cluster
        ("node.pod.volumes[0].name=models", "node.pod.volumes[0].name: expected another name than models"),
        ("head.pod.containers[0].name=ray-head", "head.pod.containers[0].name: expected another name than ray-head"),
        ("node.pod.initContainers[0].name=pull-model-0", "expected another name than pull-model-0"),
        ("node.pod.volumeMounts[0].mountPath=/models/", "mountPath: expected another path than /models/"),
        (r"redis.valkey.pod.labels.app\.kubernetes\.io/name=x", "redis.valkey.pod.labels: expected other keys"),
        (r"head.pod.annotations.checksum/config=x", "head.pod.annotations: expected other keys than checksum/config"),
        ("node.pod.sidecars[0].name=x", "sidecars"),
        ("node.pod.env[0].value=x", "name"),
        ("node.pod.dnsPolicy=Sometimes", "dnsPolicy"),
    ],
)
def test_what_is_the_charts_is_refused_by_its_name(refusal: Callable[..., Any], setting: str, said: str) -> None:
    more = ("--set", "node.pod.volumeMounts[0].name=x") if "volumeMounts" in setting else ()
    assert said in refusal("--set", setting, *more)


def test_draft_models_are_pulled_beside_the_models_once_each(render: Render) -> None:
    model = "cluster.models[0]"
    manifests = render(
        "--set", "models.weights.example/small.size=50Mi,models.weights.example/large.size=90Mi",
        "--set", f"{model}.source=example/large,{model}.engine.speculation=draft",
        "--set", f"{model}.engine.speculation_model=example/small",
        "--set", f"{model}.decode.engine.speculation_model=example/small",
    )  # fmt: skip
    head, _ = groups_of(manifests)
    pulls = [
        each["command"][2]
        for each in head["template"]["spec"]["initContainers"]
        if each["name"].startswith("pull-model")
    ]
    assert pulls == ["example/large", "example/small"]
