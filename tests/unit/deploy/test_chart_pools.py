"""Pools that Kubernetes scales: what the chart renders for `kubectl scale`, HorizontalPodAutoscalers and KEDA."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from cluster.kubernetes import ACCOUNT, KubernetesApi, Pool
from tandem.config.model import ModelSpec
from tandem.rpc.identity import Identity
from tests.unit.cluster.test_scale_adapter import ACCESS, DEFINITION, SCHEMA
from tests.unit.deploy.test_chart import cluster_spec, container_of
from tests.unit.deploy.test_chart_objects import NEWEST, OLDEST
from tests.unit.deploy.test_chart_routers import selects

EXAMPLES = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "examples"
SCALED = ("--values", str(EXAMPLES / "scaled-pools.yaml"))
ONE_POD = ("--set", "scaleAdapter.enabled=true,cluster.security.allow_plaintext=true")
NAME = "test-tandem-scale"

Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]
Render = Callable[..., Manifests]


def pools_of(manifests: Manifests) -> list[Manifest]:
    return [manifest for (kind, _), manifest in manifests.items() if kind == "Pool"]


def test_the_resource_has_a_scale_subresource_that_kubernetes_takes() -> None:
    resource = DEFINITION
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(resource, version, strict=True)
    (version,) = resource["spec"]["versions"]
    assert resource["metadata"]["name"] == f"{resource['spec']['names']['plural']}.{resource['spec']['group']}"
    assert f"/apis/{resource['spec']['group']}/{version['name']}/" in KubernetesApi("", "n", "r")._pool_objects
    for path in version["subresources"]["scale"].values():
        _, part, field = path.split(".")
        assert field in version["schema"]["openAPIV3Schema"]["properties"][part]["properties"]


def test_the_roles_that_every_namespace_has_may_use_pools(render: Render) -> None:
    """A person who installs a release needs the rights that the adapter's Role gives."""
    edit, view = ACCESS
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert edit["metadata"]["labels"] == {f"{prefix}admin": "true", f"{prefix}edit": "true"}
    assert view["metadata"]["labels"] == {f"{prefix}view": "true"}
    for role in ACCESS:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(role, version, strict=True)
    (may,), (may_read,) = edit["rules"], view["rules"]
    assert {"pools", "pools/scale"} <= set(may["resources"])
    assert may_read["verbs"] == ["get", "list", "watch"]
    for rule in render(*SCALED)["Role", NAME]["rules"]:
        assert all(set(rule[key]) <= set(may[key]) for key in rule)


@pytest.mark.parametrize("named", ["cluster.models[0].name", "cluster.models[0].source"])
def test_long_names_that_begin_alike_have_pools_of_their_own(render: Render, named: str) -> None:
    long = "a-name-of-a-model-that-is-longer-than-forty-letters"
    key = named.rpartition(".")[2]
    models = f"cluster.models[0].{key}={long}-a,cluster.models[1].{key}={long}-b,node.resources.requests.cpu=4"
    names = [each["metadata"]["name"] for each in pools_of(render(*ONE_POD, "--set", models))]
    assert len(set(names)) == 4
    for name in names:
        assert name.startswith("test-tandem-a-name-of-a-model-that-is-longe-")
        assert len(name) <= len("test-tandem-") + 40 + len("-prefill")


def test_the_adapter_may_be_where_the_head_may_be(render: Render) -> None:
    place = {"nodeSelector": {"pool": "llm"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}

    def placed(value: str, *arguments: str) -> dict[str, Any]:
        settings = (part for key in place for part in ("--set-json", f"{value}.{key}={json.dumps(place[key])}"))
        pod = render(*arguments, *settings)["Deployment", NAME]["spec"]["template"]["spec"]
        return {key: pod[key] for key in place if key in pod}

    assert placed("node", *ONE_POD) == place, "the head pod is a node"
    assert placed("node", *SCALED) == {}
    assert placed("head", *SCALED) == place


def test_each_model_and_role_has_a_pool_without_a_size(render: Render) -> None:
    """With one, each upgrade would take back what an autoscaler set."""
    models = "cluster.models[0].name=Org/Llama_3.1,cluster.models[1].source=org/b.gguf"
    manifests = render(*ONE_POD, "--set", f"{models},node.resources.requests.cpu=4")
    pools = pools_of(manifests)
    names = [model.served_name for model in cluster_spec(manifests).models]
    assert names == ["Org/Llama_3.1", "b"] == [ModelSpec(name="Org/Llama_3.1").served_name, "b"]
    assert [(each["spec"]["model"], each["spec"]["role"]) for each in pools] == [
        (name, role) for name in names for role in ("prefill", "decode")
    ]
    assert pools[0]["metadata"]["name"] == "test-tandem-org-llama-3-1-prefill"
    for each in pools:
        jsonschema.validate(each, SCHEMA)
        assert "replicas" not in each["spec"]
        assert each["apiVersion"] == "tandem.dev/v1alpha1"
        read = Pool.parse(each | {"metadata": each["metadata"] | {"uid": "u", "resourceVersion": "1"}})
        assert (read.replicas, each["spec"]["release"]) == (None, "test")
    assert pools_of(render()) == []


def test_the_adapter_may_do_what_it_needs_and_only_its_container_has_the_token(render: Render) -> None:
    manifests = render(*SCALED)
    assert manifests["Role", NAME]["rules"] == [
        {"apiGroups": ["tandem.dev"], "resources": ["pools"], "verbs": ["list", "patch"]},
        {"apiGroups": ["tandem.dev"], "resources": ["pools/status"], "verbs": ["patch"]},
    ]
    pod = manifests["Deployment", NAME]["spec"]["template"]["spec"]
    assert manifests["RoleBinding", NAME]["roleRef"]["name"] == NAME
    assert (
        [each["name"] for each in manifests["RoleBinding", NAME]["subjects"]] == [NAME] == [pod["serviceAccountName"]]
    )
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (token,) = [each for each in pod["volumes"] if each["name"] == mounts[str(ACCOUNT)]]
    account, authority, _ = token["projected"]["sources"]
    assert account["serviceAccountToken"]["path"] == "token"
    assert authority["configMap"]["items"][0]["path"] == "ca.crt"
    bound = [name for (kind, name), each in manifests.items() if kind == "RoleBinding"]
    assert bound == [NAME]


def test_the_adapter_finds_the_controller(render: Render) -> None:
    for arguments in (
        SCALED,
        ONE_POD,
        (*ONE_POD, "--set", "routers.replicas=1,redis.mode=external,redis.external.existingSecret=r"),
    ):
        manifests = render(*arguments)
        (container,) = manifests["Deployment", NAME]["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["python", "-m", "cluster.scale_adapter"]
        assert "--controller=test-tandem-control.serving.svc:50050" in container["args"]
        head = manifests["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]
        ports = {port["name"]: port["containerPort"] for port in container_of(head)["ports"]}
        service = manifests["Service", "test-tandem-control"]["spec"]
        assert (service["ports"][0]["port"], service["ports"][0]["targetPort"], ports["admin"]) == (
            50050,
            "admin",
            50050,
        )
        spec = cluster_spec(manifests)
        assert spec.control.admin_host != "127.0.0.1"
        assert spec.autoscaler.external
        labels = manifests["Deployment", NAME]["spec"]["template"]["metadata"]["labels"]
        out = manifests["NetworkPolicy", NAME]["spec"]
        into = manifests["NetworkPolicy", "test-tandem-control"]["spec"]
        head_labels = head["template"]["metadata"]["labels"]
        assert selects(out["podSelector"], labels)
        assert selects(out["egress"][1]["to"][0]["podSelector"], head_labels)
        assert selects(into["podSelector"], head_labels)
        assert selects(into["ingress"][0]["from"][0]["podSelector"], labels)
        assert [port["port"] for port in out["egress"][0]["ports"]] == [443, 6443]
        assert (
            ("egress" in into)
            == ("Egress" in into["policyTypes"])
            == (("Deployment", "test-tandem-router") in manifests)
        )
    assert not cluster_spec(render()).autoscaler.external
    assert ("Service", "test-tandem-control") not in render()


def test_the_adapter_costs_no_pod_with_routers_a_restart(render: Render) -> None:
    """Without them, the head gets a port."""
    pods = ("--values", str(EXAMPLES / "router-pods.yaml"))
    before, after = render(*pods), render(*pods, "--set", "scaleAdapter.enabled=true")
    for key in (("RayCluster", "test-tandem"), ("Deployment", "test-tandem-router")):
        assert before[key] == after[key]
    assert {name for kind, name in before if kind == "Job"} == {name for kind, name in after if kind == "Job"}
    assert render(*ONE_POD)["RayCluster", "test-tandem"] != render()["RayCluster", "test-tandem"]


def test_the_adapters_certificate_is_an_admins(render: Render) -> None:
    issued = "tls.internal.certManager.enabled=true,tls.internal.certManager.issuerRef.name=i"
    manifests = render(*ONE_POD, "--set", issued)
    certificate = manifests["Certificate", NAME]["spec"]
    assert certificate["uris"] == [f"spiffe://tandem/tandem/{Identity.ADMIN}"]
    pod = manifests["Deployment", NAME]["spec"]["template"]["spec"]
    assert [each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each] == [certificate["secretName"]]
    assert "--tls-cert=/etc/tandem-tls/internal/tls.crt" in pod["containers"][0]["args"]


def test_an_autoscaler_and_a_scaled_object_drive_the_pools_of_the_example(render: Render) -> None:
    manifests = render(*SCALED)
    by_role = {each["spec"]["role"]: each["metadata"]["name"] for each in pools_of(manifests)}
    scaler = manifests["HorizontalPodAutoscaler", by_role["decode"]]["spec"]
    target = {"apiVersion": "tandem.dev/v1alpha1", "kind": "Pool"}
    assert scaler["scaleTargetRef"] == target | {"name": by_role["decode"]}
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 12)
    assert scaler["behavior"]["scaleDown"] == {"stabilizationWindowSeconds": 600}
    scaled = manifests["ScaledObject", by_role["prefill"]]
    assert scaled["metadata"]["namespace"] == "serving"
    assert scaled["spec"]["scaleTargetRef"] == target | {"name": by_role["prefill"]}


def test_a_pod_of_ones_own_taste(render: Render) -> None:
    more = 'scaleAdapter.pod={"labels":{"team":"a"},"env":[{"name":"A","value":"b"}],"priorityClassName":"high"}'
    template = render(*ONE_POD, "--set-json", more)["Deployment", NAME]["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["spec"]["containers"][0]["env"] == [{"name": "A", "value": "b"}]
    assert template["spec"]["priorityClassName"] == "high"


METRIC = {
    "type": "External",
    "external": {"metric": {"name": "m"}, "target": {"type": "AverageValue", "averageValue": 1}},
}


def scaler(**more: Any) -> str:
    return "scaleAdapter.autoscalers=" + json.dumps([{"role": "decode", "maxReplicas": 2, "metrics": [METRIC]} | more])


CPU = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}}
VALUE = {"type": "Object", "object": {"target": {"type": "Value", "value": 1}}}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("scaleAdapter.enabled=false", "scaleAdapter.autoscalers: expected none without scaleAdapter.enabled"),
        ("cluster.autoscaler.enabled=true", "cluster.autoscaler.enabled: expected false with scaleAdapter.enabled"),
        ("cluster.security.allow_plaintext=false", "because the scale adapter calls the controller over the network"),
        (scaler(model="x"), "scaleAdapter.autoscalers[0].model: expected one of smollm2-135m, got x"),
        (scaler(minReplicas=3), "scaleAdapter.autoscalers[0].maxReplicas: expected at least minReplicas (3), got 2"),
        (scaler(metrics=[METRIC, CPU]), "autoscalers[0].metrics[1].type: expected External or Object, got Resource"),
        (scaler(metrics=[VALUE]), "metrics[0].object.target.type: expected AverageValue, the metric's sum"),
        (scaler(metrics=[]), "/scaleAdapter/autoscalers/0/metrics"),
        (scaler(role="both"), "/scaleAdapter/autoscalers/0/role"),
        (scaler(minReplicas=0), "/scaleAdapter/autoscalers/0/minReplicas"),
        (f"{scaler()[:-1]},{scaler().partition('[')[2]}", "scaleAdapter.autoscalers[1]: expected one autoscaler"),
        ('cluster.models=[{"prefill":{"workers":0}}]&' + scaler(role="prefill"),
         "cluster.models[0].prefill.workers: expected at least 1 worker at the start with scaleAdapter.autoscalers[0]"),
        ('cluster.models=[{"name":"a.b"},{"name":"a-b"}]', "cluster.models[1].name: expected a name whose letters and"),
        ('scaleAdapter.pod.volumes=[{"name":"api-token"}]', "scaleAdapter.pod.volumes[0].name: expected another name"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(refusal: Callable[..., str], setting: str, said: str) -> None:
    plain = "cluster.security.allow_plaintext=true"  # not by --set, which helm reads last
    given = ["scaleAdapter.enabled=true", plain, scaler(), *setting.split("&")]
    assert said in refusal(*(part for each in given for part in ("--set-json", each)))


def test_a_maximum_that_no_nodes_can_hold_is_refused(refusal: Callable[..., str], render: Render) -> None:
    """16 GPUs. The other pool begins with several workers, but KEDA or a hand may leave prefill none and decode one."""
    render(*SCALED, "--set-json", scaler(maxReplicas=16))
    render(*SCALED, "--set-json", scaler(maxReplicas=15, role="prefill"))
    said = refusal(*SCALED, "--set-json", scaler(maxReplicas=17))
    assert "scaleAdapter.autoscalers[0].maxReplicas: expected at most what the nodes can hold (16 GPUs" in said
    assert "beside the other pools' least (1 GPUs)" in refusal(
        *SCALED, "--set-json", scaler(maxReplicas=16, role="prefill")
    )
