"""Node groups: pods of several kinds in one release, and workers that go to those which their role allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.config.model import NODE_GROUP_LABEL, Role
from tests.unit.deploy.test_chart import cluster_spec, container_of, values

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]

BASE = (
    "redis.mode=external,redis.external.existingSecret=r,cluster.security.allow_plaintext=true,node.onHead=false,"
    "node.resources.requests.cpu=32,node.resources.limits.memory=512Gi"
)
GPU = "cluster.models[0].engine.device=cuda,cluster.models[0].engine.dtype=bfloat16"
A, B = "nodeGroups[0].name=a,nodeGroups[0].replicas=1", "nodeGroups[1].name=b,nodeGroups[1].replicas=1"


def worker_groups(manifests: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in manifests["RayCluster", "test-tandem"]["spec"]["workerGroupSpecs"]}


def test_each_group_has_what_it_says_and_otherwise_what_node_says(render: Render) -> None:
    groups = worker_groups(render(*values("mixed-groups")))
    assert groups.pop("nodes")["maxReplicas"] == 0, "KubeRay keeps the pods of a group that is no longer there"
    assert list(groups) == ["h100", "h200", "cpu"]
    sizes = {name: (each["replicas"], each["minReplicas"], each["maxReplicas"]) for name, each in groups.items()}
    assert sizes == {"h100": (2, 0, 4), "h200": (1, 0, 1), "cpu": (1, 0, 1)}
    for name, group in groups.items():
        spec, resources = group["template"]["spec"], container_of(group)["resources"]
        assert group["labels"] == {NODE_GROUP_LABEL: name}
        assert group["template"]["metadata"]["labels"][NODE_GROUP_LABEL] == name
        assert ("nvidia.com/gpu" in resources["limits"]) == (name != "cpu")
        assert resources["limits"]["memory"] == ("16Gi" if name == "cpu" else "512Gi")
        assert bool(spec.get("tolerations")) == (name != "cpu")
        assert group["rayStartParams"]["num-gpus"] == ("0" if name == "cpu" else "8")


def test_pools_say_the_groups_with_their_role_unless_they_name_some(render: Render) -> None:
    large, small = cluster_spec(render(*values("mixed-groups"))).models
    assert [large.pool(role).node_groups for role in Role] == [("h100",), ("h200", "cpu")]
    assert [small.pool(role).node_groups for role in Role] == [("cpu",), ("cpu",)]


def test_without_groups_nothing_says_one(render: Render) -> None:
    manifests = render()
    assert "labels" not in worker_groups(manifests)["nodes"]
    assert "labels" not in manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]
    assert not cluster_spec(manifests).models[0].prefill.node_groups


def test_a_head_that_is_a_node_is_one_of_the_group_nodes(render: Render) -> None:
    manifests = render("--set", f"{BASE},{A},node.onHead=true,node.roles[0]=decode,nodeGroups[0].roles[0]=prefill")
    head = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]
    assert head["labels"] == {NODE_GROUP_LABEL: "nodes"}
    (model,) = cluster_spec(manifests).models
    assert (model.prefill.node_groups, model.decode.node_groups) == (("a",), ("nodes",))


def test_a_rollout_counts_each_group_by_its_own_template(render: Render) -> None:
    rolling = (
        "routers.replicas=1,upgrade.strategy=rolling,ray.gcsFaultTolerance.enabled=true,"
        "ray.gcsFaultTolerance.existingSecret=r,ray.gcsFaultTolerance.address=redis://redis:6379"
    )
    manifests = render("--set", f"{BASE},{A},{B},node.replicas=1,nodeGroups[1].gpus=2,{rolling}")
    (job,) = (each for (kind, _), each in manifests.items() if kind == "Job")
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    asked = dict(each.removeprefix("--pods=").rsplit(":", 1) for each in arguments if each.startswith("--pods="))
    groups = worker_groups(manifests)
    shown = {
        f"node/{name}:1": each["template"]["metadata"]["annotations"]["tandem/template"]
        for name, each in groups.items()
    }
    assert {name: template for name, template in asked.items() if name.startswith("node/")} == shown
    assert len(set(shown.values())) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (f"{A},nodeGroups[0].roles[0]=prefill", "expected a group whose roles have decode"),
        (f"{A},nodeGroups[1].name=a,nodeGroups[1].replicas=1", "nodeGroups[1].name: expected another name than a"),
        (f"{A},cluster.models[0].decode.node_groups[0]=c", "cluster.models[0].decode.node_groups: expected names of"),
        (f"{A},nodeGroups[0].maxReplicas=0", "nodeGroups[0].maxReplicas: expected at least nodeGroups[0].replicas (1)"),
        (f"{A},nodeGroups[0].minReplicas=2", "nodeGroups[0].minReplicas: expected at most nodeGroups[0].replicas (1)"),
        (f"{A},{GPU}", "nodeGroups[0].gpus: expected the GPUs of a node, because cluster.models[0].engine.device"),
        (
            f"{A},{B},{GPU},nodeGroups[0].gpus=4,nodeGroups[1].gpus=4,nodeGroups[0].roles[0]=prefill,"
            "nodeGroups[1].roles[0]=decode,cluster.models[0].prefill.tp=4,cluster.models[0].prefill.workers=2",
            "nodeGroups[0].gpus: expected 8 or more over 1 node",  # though the other group has room
        ),
        (
            f"{A},{B},{GPU},nodeGroups[0].gpus=6,nodeGroups[1].gpus=6,cluster.models[0].prefill.tp=4,"
            "cluster.models[0].prefill.workers=2,cluster.models[0].decode.tp=4",
            "has a worker of 4 GPUs that fits on no node",
        ),
        (
            f"{A},{B},{GPU},nodeGroups[0].gpus=8,nodeGroups[1].gpus=2,nodeGroups[1].roles[0]=decode,"
            "cluster.models[0].decode.tp=4,cluster.models[0].decode.node_groups[0]=b",
            "cluster.models[0].decode.tp: expected at most nodeGroups[1].gpus (2)",
        ),
        (
            f"{A},{B},{GPU},nodeGroups[0].gpus=4,nodeGroups[1].gpus=4,cluster.models[0].prefill.tp=4,"
            "cluster.models[0].decode.tp=4,cluster.models[0].colocate=require",
            "cluster.models[0].colocate: expected prefer or no: a prefill and a decode worker need 8 GPUs of one node",
        ),
        (
            f"{A},{B},cluster.models[0].decode.node_groups[0]=b,cluster.models[0].decode.workers=40",
            "nodeGroups[1].resources.requests.cpu: expected 40 or more over 1 node",
        ),
        (f"{A},nodeGroups[0].rdma.resource=rdma/x,cluster.transfer.transport=tcp", "nodeGroups[0].rdma.resource"),
        (f"{A},nodeGroups[0].pod.env[0].name=POD_IP", "nodeGroups[0].pod.env[0].name: expected another name"),
        (
            f"{A},cluster.models[0].colocate=require,cluster.models[0].prefill.workers=0",
            "colocate: expected prefer or no",
        ),
        (
            f"{A},{B},nodeGroups[0].roles[0]=prefill,nodeGroups[1].roles[0]=decode,cluster.models[0].colocate=require",
            "cluster.models[0].colocate: expected prefer or no: prefill and decode workers may be on no common node (a",
        ),
        (f"{A},nodeGroups[0].sharedMemory=1Mi", "nodeGroups[0].sharedMemory: expected at least 256Mi"),
        (f"{A},node.pod.labels.tandem/node-group=x", "node.pod.labels: expected other keys than tandem/node-group"),
        ("nodeGroups[0].name=7,nodeGroups[0].replicas=1", "nodeGroups"),
        ("nodeGroups[0].name=nodes,nodeGroups[0].replicas=1", "nodeGroups"),
        ("nodeGroups[0].name=a", "nodeGroups[0].replicas: expected at least 1: workers of cluster.models[0].prefill"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value(refusal: Callable[..., str], given: str, message: str) -> None:
    assert message in refusal("--set", f"{BASE},{given}")


@pytest.mark.parametrize(
    "given",
    [
        f"{A},nodeGroups[0].roles[0]=decode,cluster.models[0].prefill.workers=0",  # which needs no group
        f"{A},nodeGroups[0].rdma.resource=rdma/x",
    ],
)
def test_what_can_be_renders(render: Render, given: str) -> None:
    group = worker_groups(render("--set", f"{BASE},{given}"))["a"]
    assert container_of(group)["resources"]["limits"].get("rdma/x", 1) == 1


def test_pods_of_nodes_are_new_when_rays_nodes_need_the_label(render: Render) -> None:
    """Ray's nodes get it when they start only."""

    def templates(given: str) -> dict[str, str]:
        groups = worker_groups(render("--set", f"{BASE},node.replicas=2{given}"))
        return {name: each["template"]["metadata"]["annotations"]["tandem/template"] for name, each in groups.items()}

    before, after = templates(""), templates(f",node.roles[0]=decode,{A},nodeGroups[0].roles[0]=prefill")
    assert before["nodes"] != after["nodes"]


def test_pools_that_fit_their_groups_render(render: Render) -> None:
    """The narrow pool may go anywhere; the wide one fits one group only, and is placed first."""
    render(
        "--set",
        f"{BASE},{A},{B},{GPU},nodeGroups[0].gpus=4,nodeGroups[1].gpus=2,nodeGroups[1].replicas=2,"
        "cluster.models[0].prefill.workers=4,cluster.models[0].decode.tp=4",
    )


GROWS = f"{BASE},ray.autoscaling.enabled=true"


def test_rays_autoscaler_has_a_token_that_no_other_container_has(render: Render) -> None:
    manifests = render("--set", f"{GROWS},node.minReplicas=1,nodeGroups[0].name=a,nodeGroups[0].maxReplicas=3")
    spec = manifests["RayCluster", "test-tandem"]["spec"]
    assert spec["enableInTreeAutoscaling"]
    options, head = spec["autoscalerOptions"], spec["headGroupSpec"]["template"]["spec"]
    (token,) = [each["mountPath"] for each in options["volumeMounts"] if each["name"] == "autoscaler-token"]
    assert token == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert "autoscaler-token" in {each["name"] for each in head["volumes"]}
    mounted = [mount["name"] for each in head["containers"] for mount in each["volumeMounts"]]
    assert "autoscaler-token" not in mounted
    assert not head["automountServiceAccountToken"]
    assert head["serviceAccountName"] == "test-tandem-head"
    assert ("ServiceAccount", "test-tandem-head") in manifests
    assert ("NetworkPolicy", "test-tandem-autoscaler") in manifests
    _, group = spec["workerGroupSpecs"]  # no pods of `node` itself
    assert group["template"]["spec"]["serviceAccountName"] == "test-tandem"
    assert (group["groupName"], group["minReplicas"], group["maxReplicas"]) == ("a", 0, 3)
    assert "replicas" not in group, "the autoscaler's"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            f"{GROWS},node.replicas=1",
            "node.replicas: expected 0 with ray.autoscaling.enabled, which begins with node.min",
        ),
        (f"{GROWS},node.minReplicas=9", "node.minReplicas: expected at most node.maxReplicas (8), got 9"),
        (f"{GROWS},node.maxReplicas=0", "ray.autoscaling.enabled: expected maxReplicas of node"),
        (
            f"{GROWS},cluster.models[0].colocate=require",
            "cluster.models[0].colocate: expected prefer or no with ray.auto",
        ),
        (f"{GROWS},{GPU},node.gpus=1,node.maxReplicas=1", "node.gpus: expected 2 or more over 1 node"),
        ("ray.autoscaling.enabled=true", "redis.mode: expected valkey or external with several pods"),
        (f"{GROWS},head.pod.containers[0].name=autoscaler", "head.pod.containers[0].name: expected another name"),
    ],
)
def test_what_no_autoscaler_can_do_is_refused(refusal: Callable[..., str], given: str, message: str) -> None:
    assert message in refusal("--set", given)
