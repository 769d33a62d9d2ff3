"""Routers in pods of their own, as the chart renders them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.rollout import Wanted
from router.joining import JoinOptions, add_arguments
from tandem.rpc.identity import Identity

EXAMPLES = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "examples"
PODS = ("--values", str(EXAMPLES / "router-pods.yaml"))

Manifests = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Manifests]


def template_of(manifests: Manifests) -> dict[str, Any]:
    template: dict[str, Any] = manifests["Deployment", "test-tandem-router"]["spec"]["template"]
    return template


def container_of(manifests: Manifests) -> dict[str, Any]:
    (container,) = template_of(manifests)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items() and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


def test_a_router_gets_arguments_that_it_takes(render: Render) -> None:
    manifests = render(*PODS)
    container = container_of(manifests)
    assert container["command"] == ["python", "-m", "router"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [
        part.replace("$(POD_NAME)", "test-tandem-router-5d4b9c6f7-x2x4z").replace("$(POD_IP)", "10.0.0.7")
        for part in container["args"]
    ]
    options = JoinOptions.parse(parser.parse_args(given))
    assert options.cluster == "pods"
    assert options.leave_s == 10
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": options.http_port, "grpc": options.grpc_port, "control": options.control_port}
    service, _, port = options.controller.partition(":")
    name, namespace, _ = service.split(".")
    assert namespace == "serving"
    control = manifests["Service", name]["spec"]
    assert [str(each["port"]) for each in control["ports"]] == [port]
    head = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]
    assert control["selector"].items() <= head["metadata"]["labels"].items()
    named = {each["name"]: each["containerPort"] for each in head["spec"]["containers"][0]["ports"]}
    spec = yaml.safe_load(manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"])
    assert named["admin"] == spec["control"]["admin_port"]
    assert spec["router"]["replicas"] == 0


def test_everything_finds_the_routers(render: Render) -> None:
    arguments = ("--set", "monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true")
    manifests = render(*PODS, *arguments)
    labels = template_of(manifests)["metadata"]["labels"]
    head = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    for kind in ("http", "grpc", "headless"):
        selector = manifests["Service", f"test-tandem-{kind}"]["spec"]["selector"]
        assert selector.items() <= labels.items()
        assert not selector.items() <= head.items()
    for kind, name in (
        ("PodMonitor", "test-tandem"),
        ("PodDisruptionBudget", "test-tandem-router"),
        ("Deployment", "test-tandem-router"),
    ):
        assert selects(manifests[kind, name]["spec"]["selector"], labels)
    (spread,) = template_of(manifests)["spec"]["topologySpreadConstraints"]
    assert selects(spread["labelSelector"], labels)
    scaler = manifests["HorizontalPodAutoscaler", "test-tandem-router"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "test-tandem-router"
    assert "replicas" not in manifests["Deployment", "test-tandem-router"]["spec"], "the scaler's"


def test_a_router_may_call_what_it_needs_and_is_called_by_whom_it_should(render: Render) -> None:
    policies = [manifest["spec"] for (kind, _), manifest in render(*PODS).items() if kind == "NetworkPolicy"]
    own = {"app.kubernetes.io/instance": "test", "app.kubernetes.io/part-of": "tandem"}

    def pod(component: str) -> dict[str, str]:
        return own | {"app.kubernetes.io/component": component}

    def opens(direction: str, here: str, there: str) -> list[str]:
        """The ports that policies of `here` open to, or for, `there`; any: all."""
        peers, found = {"egress": "to", "ingress": "from"}[direction], []
        for policy in (each for each in policies if selects(each["podSelector"], pod(here))):
            for rule in policy.get(direction, []):
                if not rule.get(peers) or any(selects(each.get("podSelector", {}), pod(there)) for each in rule[peers]):
                    found += [str(port["port"]) for port in rule["ports"]] if "ports" in rule else ["any"]
        return [port for port in found if port != "53"]  # names

    assert opens("egress", "router", "node") == opens("ingress", "node", "router") == ["any"]
    assert set(opens("egress", "router", "head")) == set(opens("ingress", "head", "router")) == {"admin"}
    assert "any" not in opens("egress", "node", "router"), "no worker opens a connection to a router"
    assert "redis" in opens("egress", "router", "valkey")
    assert "redis" in opens("ingress", "valkey", "router")
    assert "control" in opens("ingress", "router", "head")
    assert "control" not in opens("ingress", "router", "test")
    assert set(opens("egress", "head", "router")) == {"control", "443"}, "443 is the model hub"
    assert {"http", "grpc"} <= set(opens("ingress", "router", "test"))
    assert "443" not in opens("egress", "router", "elsewhere"), "it pulls no model"


def test_each_pod_has_the_roles_and_files_that_it_needs(render: Render) -> None:
    manifests = render(*PODS)
    roles = {
        name.removeprefix("test-tandem-"): {uri.rpartition("/")[2] for uri in manifest["spec"].get("uris", [])}
        for (kind, name), manifest in manifests.items()
        if kind == "Certificate"
    }
    assert roles == {
        "edge": set(),
        "head": {Identity.CONTROLLER, Identity.WORKER, Identity.ADMIN},
        "node": {Identity.WORKER},
        "router": {Identity.ROUTER},
        "roll": {Identity.ADMIN},
    }
    pod = template_of(manifests)["spec"]
    secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    assert secrets == {"test-tandem-router-tls", "test-tandem-edge-tls", "tandem-keys", "tandem-valkey-tls"}
    head = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]["spec"]
    assert not {"test-tandem-edge-tls", "tandem-keys"} & {
        volume["secret"]["secretName"] for volume in head["volumes"] if "secret" in volume
    }
    assert "initContainers" not in pod
    mounts = {mount["mountPath"] for mount in container_of(manifests)["volumeMounts"]}
    spec = yaml.safe_load(manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"])
    needed = [spec["router"]["tls"]["cert"], spec["security"]["auth"]["keys_file"], spec["security"]["tls"]["cert"]]
    assert {str(Path(path).parent) for path in needed} <= mounts


def test_a_restart_of_the_head_is_none_of_the_routers(render: Render) -> None:
    """Nor is a change of what the cluster's spec says: the controller tells them."""
    before = render(*PODS)
    for setting in ("cluster.models[0].decode.workers=2", "cluster.log_level=debug", "cluster.router.policy=random"):
        changed = render(*PODS, "--set-json", setting if "2" in setting else setting.replace("=", '="') + '"')
        assert changed["Deployment", "test-tandem-router"] == before["Deployment", "test-tandem-router"]
        assert changed["ConfigMap", "test-tandem"] != before["ConfigMap", "test-tandem"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("routers.replicas=2", "routers.replicas: expected 0 with routers.autoscaling.enabled"),
        ("cluster.router.replicas=2", "cluster.router.replicas: expected none with routers in pods of their own"),
        ("routers.autoscaling.maxReplicas=1", "routers.autoscaling.maxReplicas: expected at least minReplicas (2)"),
        ("routers.autoscaling.cpuPercent=0", "routers.autoscaling: expected cpuPercent, queuedRequests or metrics"),
        ("routers.resources.requests.cpu=null", "routers.resources.requests.cpu: expected a quantity"),
        (
            "redis.mode=embedded,ray.gcsFaultTolerance.enabled=false,upgrade.strategy=recreate",
            "redis.mode: expected valkey or external",
        ),
        ("tls.internal.certManager.enabled=false", "tls.internal: expected existingSecret or certManager.enabled"),
        ("routers.pod.env[0].name=POD_NAME", "routers.pod.env[0].name: expected another name than POD_NAME"),
        ("routers.autoscaling.max=9", "additional properties 'max' not allowed"),
        ("routers.terminationGracePeriodSeconds=5", "routers.terminationGracePeriodSeconds: expected 0"),
    ],
)
def test_what_cannot_work_is_refused(refusal: Callable[..., str], setting: str, said: str) -> None:
    assert said in refusal(*PODS, "--set", setting)


POOL = (
    "gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.inferencePool.enabled=true,routers.replicas=2,"
    "redis.mode=external,redis.external.existingSecret=x,cluster.security.allow_plaintext=true,"
    "cluster.security.auth.mode=none"
)


def test_an_inference_pool_selects_the_routers_which_have_what_its_picker_reads(render: Render) -> None:
    picker = "gateway.inferencePool.endpointPicker.service=picker"
    manifests = render("--set", f"{POOL},{picker},gateway.backends[0].release=blue,gateway.backends[0].weight=3")
    pool = manifests["InferencePool", "test-tandem"]["spec"]
    assert selects(pool["selector"], template_of(manifests)["metadata"]["labels"])
    assert pool["targetPorts"] == [{"number": 8000}]
    assert pool["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    (rule,) = manifests["HTTPRoute", "test-tandem"]["spec"]["rules"]
    here = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
    assert rule["backendRefs"] == [
        here | {"name": "test-tandem", "weight": 1},
        here | {"name": "blue-tandem", "weight": 3},
    ]
    spec = yaml.safe_load(manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"])
    assert spec["observability"]["metrics"]["model_server_protocol"] is True
    assert spec["observability"]["logs"]["target"] == "stdout"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("gateway.enabled=false", "gateway.enabled: expected true"),
        ("routers.replicas=0", "routers.replicas: expected at least 1"),
        ("tls.edge.existingSecret=x", "gateway.inferencePool.enabled: expected false with tls.edge"),
        ("auth.existingSecret=k,test.apiKeySecret.name=k", "expected false with keys at the routers"),
        ("cluster.observability.metrics.enabled=false", "cluster.observability.metrics.enabled: expected true"),
        ("gateway.inferencePool.endpointPicker.service=", "gateway.inferencePool.endpointPicker.service: expected"),
    ],
)
def test_a_pool_that_could_not_work_is_refused(refusal: Callable[..., str], setting: str, said: str) -> None:
    picker = "gateway.inferencePool.endpointPicker.service=picker"
    assert said in refusal("--set", f"{POOL},{picker},{setting}")


def test_one_switch_gives_the_smallest_install_routers_of_its_own(render: Render) -> None:
    """With what several pods need: Redis, and TLS or the word that plain text will do."""
    settings = "redis.mode=external,redis.external.existingSecret=x,cluster.security.allow_plaintext=true"
    manifests = render("--set", f"routers.replicas=3,{settings}")
    assert manifests["Deployment", "test-tandem-router"]["spec"]["replicas"] == 3
    assert ("HorizontalPodAutoscaler", "test-tandem-router") not in manifests
    spec = yaml.safe_load(manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"])
    assert spec["control"]["admin_host"] == "${POD_IP}"
    assert spec["transfer"]["bind_host"] == "auto"
    head = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["readinessProbe"]["tcpSocket"] == {"port": "admin"}


def roll_of(manifests: Manifests) -> tuple[str, dict[str, Any]]:
    ((name, job),) = [(name, each["spec"]) for (kind, name), each in manifests.items() if kind == "Job"]
    return name, job["template"]["spec"]


def templates(manifests: Manifests) -> dict[str, str]:
    ray = manifests["RayCluster", "test-tandem"]["spec"]
    groups = {"head": ray["headGroupSpec"], "node": ray["workerGroupSpecs"][0]}
    return {name: group["template"]["metadata"]["annotations"]["tandem/template"] for name, group in groups.items()}


def test_a_job_replaces_the_pods_that_a_change_concerns_and_no_others(render: Render) -> None:
    before = render(*PODS)
    assert before["RayCluster", "test-tandem"]["spec"]["upgradeStrategy"] == {"type": "None"}
    first, pod = roll_of(before)
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "cluster.rollout"]
    asked = [Wanted.parse(part.removeprefix("--pods=")) for part in container["args"] if part.startswith("--pods=")]
    assert asked == [Wanted("head", 1, templates(before)["head"]), Wanted("node/nodes", 2, templates(before)["node"])]
    volumes = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert volumes == ["test-tandem-roll-tls"]
    role = before["Role", "test-tandem-roll"]["rules"]
    assert role == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]}]
    assert before["RoleBinding", "test-tandem-roll"]["subjects"][0]["name"] == pod["serviceAccountName"]

    changed = {
        "image.tag=next": {"head", "node"},
        "node.pod.env[0].name=A": {"node"},
        "cluster.security.auth.audit_log=stdout": {"head"},
        "cluster.models[0].decode.workers=2": set(),
        "cluster.log_level=debug": set(),
        "routers.image.tag=next": set(),
    }
    for setting, concerned in changed.items():
        after = render(*PODS, "--set", setting)
        assert {name for name in ("head", "node") if templates(after)[name] != templates(before)[name]} == concerned
        assert (roll_of(after)[0] != first) == bool(concerned), "a Job cannot change: another one needs another name"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "routers.autoscaling.enabled=false",
            "upgrade.strategy: expected recreate without routers in pods of their own",
        ),
        ("ray.gcsFaultTolerance.enabled=false", "upgrade.strategy: expected recreate without ray.gcsFaultTolerance"),
        ("node.onHead=true", "upgrade.strategy: expected recreate with node.onHead"),
    ],
)
def test_a_rolling_change_that_would_be_an_outage_is_refused(
    refusal: Callable[..., str], setting: str, said: str
) -> None:
    assert said in refusal(*PODS, "--set", setting)


def test_budgets_of_ray_pods_name_how_many_stay(render: Render) -> None:
    """Kubernetes asks a pod's owner how many there are to be, for `maxUnavailable`. A RayCluster cannot tell, and every
    eviction would be refused."""

    def budgets(*arguments: str) -> dict[str, dict[str, int]]:
        return {
            name.removeprefix("test-tandem-"): {key: value for key, value in each["spec"].items() if key != "selector"}
            for (kind, name), each in render(*PODS, *arguments).items()
            if kind == "PodDisruptionBudget"
        }

    found = budgets("--set", "node.replicas=3")
    assert found["node"] == {"minAvailable": 2}
    assert found["head"] == {"minAvailable": 0}, "the next head takes over"
    assert found["router"] == {"maxUnavailable": 1}, "a Deployment can tell"
    more = "node.replicas=3,nodeGroups[0].name=more,nodeGroups[0].replicas=2"
    found = budgets("--set", f"{more},disruption.nodes.maxUnavailable=2,disruption.head.maxUnavailable=0")
    assert (found["node"], found["head"]) == ({"minAvailable": 3}, {"minAvailable": 1})
