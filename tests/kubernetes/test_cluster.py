"""Every example of the chart through a real API server (`make check-cluster`), with its defaults, server-side apply,
admission and CEL. There is no kubelet and no controller: the tests write what those would."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.testing.chart_edits import rendered
from tandem.checkpoint.model_store import pull
from tandem.config.model import DEMO_MODEL
from tests.e2e.chart_pods import HEAD_IP, Machines, answer_of, ask
from tests.e2e.test_chart_pods import VALUES, deployed
from tests.kubernetes.api_server import ROOT, ApiServer, listed
from tests.kubernetes.definitions import chosen
from tests.kubernetes.stand_ins import Manifest, budget_status, lost, needed, pod, pod_templates
from tests.unit.deploy.test_crd import BROKEN, POOL, ROUTES, Change

ASSETS, CRDS = os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("KUBERNETES_CRDS")
MISSING = (
    "KUBEBUILDER_ASSETS is not set: expected the folder of etcd and kube-apiserver that "
    "`setup-envtest use 1.36.x -p path` prints"
)
pytestmark = [pytest.mark.system, pytest.mark.skipif(not ASSETS, reason=MISSING)]

CHART = ROOT / "helm" / "tandem"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
LIVE = "cluster.log_level=debug"
QUOTA = {"requests.cpu": "10k", "requests.memory": "100Ti", "limits.memory": "100Ti", "pods": "100"}
CONFINED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    assert ASSETS is not None
    trimmed = yaml.safe_load((ROOT / "tests" / "data" / "custom-resources.yaml").read_text())["items"]
    pools = yaml.safe_load_all((CHART / "files" / "pools.tandem.dev.yaml").read_text())
    with ApiServer(Path(ASSETS), tmp_path_factory.mktemp("cluster")) as server:
        server.define([*chosen(trimmed, Path(CRDS) if CRDS else None), *pools])
        yield server
    assert server.problems == []


def bare(**container: Any) -> Manifest:
    spec = {"containers": [{"name": "a", "image": "a:1", **container}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bare"}, "spec": spec}


def refusal(api: ApiServer, namespace: str, manifest: Manifest) -> str:
    """Empty if the API server admits it."""
    return api.error("create", "--dry-run=server", f"--namespace={namespace}", "--filename=-", given=manifest)


def new_namespace(api: ApiServer, name: str, contents: Sequence[Manifest] = ()) -> str:
    """With a quota whose status is the quota controller's: without one, the API server does not enforce it."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}])
    room = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "room"}, "spec": {"hard": QUOTA}}
    api.apply([*contents, room], f"--namespace={name}")
    assert not api.set_status("resourcequota", "room", name, {"hard": QUOTA, "used": dict.fromkeys(QUOTA, "0")})

    def problem() -> str:
        said = refusal(api, name, bare(securityContext=CONFINED))
        return "" if "failed quota: room: must specify" in said else said or "a pod without limits admitted"

    api.wait("a quota in force", problem)
    return name


def templated(api: ApiServer, namespace: str, values: Path) -> list[Manifest]:
    text = api.helm("template", "test", str(CHART), f"--namespace={namespace}", f"--values={values}")
    return [each for each in yaml.safe_load_all(text) if each]


def released(api: ApiServer, namespace: str) -> dict[tuple[str, str], Manifest]:
    """The objects of the release as the API server returns them, without what changes by itself."""
    text = api.helm("get", "manifest", "test", f"--namespace={namespace}")
    written = [each for each in yaml.safe_load_all(text) if each]
    found = {}
    read = api.objects(f"--namespace={namespace}", "--filename=-", given=listed(written))
    for before, after in zip(written, read, strict=True):
        assert list(lost(before, after)) == [], before["kind"]
        kept = {key: each for key, each in after["metadata"].items() if key not in ("managedFields", "resourceVersion")}
        found[after["kind"], kept["name"]] = {**after, "metadata": kept, "status": None}
    return found


def everything(api: ApiServer, namespace: str) -> set[str]:
    kinds = api.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
    listable = ",".join(kind for kind in kinds if not kind.startswith("events"))
    return set(api.kubectl("get", listable, f"--namespace={namespace}", "--output=name").split())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_release_is_installed_changed_rolled_back_and_removed(api: ApiServer, example: Path) -> None:
    namespace = new_namespace(api, example.stem, needed(templated(api, example.stem, example)))
    before = everything(api, namespace)
    release = ("test", str(CHART), f"--namespace={namespace}", f"--values={example}")

    api.helm("install", *release)
    installed = released(api, namespace)
    if any(kind == "Job" for kind, _ in installed):
        api.kubectl("wait", "job", "--all", f"--namespace={namespace}", "--for=condition=Complete", "--timeout=60s")

    api.helm("upgrade", *release)
    assert released(api, namespace) == installed, "the same values again, and so each `generation`"

    api.helm("upgrade", *release, f"--set={LIVE}")
    changed = released(api, namespace)
    assert changed != installed
    assert pod_templates(changed.values()) == pod_templates(installed.values()), "a live edit recreates no pod"

    api.helm("rollback", "test", "1", f"--namespace={namespace}")
    assert released(api, namespace) == installed

    api.helm("uninstall", "test", f"--namespace={namespace}")
    assert everything(api, namespace) == before


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_pod_is_valid_and_admitted(api: ApiServer, example: Path) -> None:
    """Under the Pod Security standard `restricted`, and counted by a quota."""
    objects = templated(api, f"{example.stem}-pods", example)
    namespace = new_namespace(api, f"{example.stem}-pods", needed(objects))
    pods = [pod(name, template) for name, template in pod_templates(objects).items()]
    api.kubectl("create", f"--namespace={namespace}", "--filename=-", given=listed(pods))
    (quota,) = api.objects("resourcequota", f"--namespace={namespace}")
    assert quota["status"]["used"]["pods"] == str(len(pods))


def test_a_pod_that_is_unconfined_or_too_large_is_refused(api: ApiServer) -> None:
    """What the test above relies on."""
    namespace = new_namespace(api, "refused")
    small, large = ({"requests": {"cpu": "1"}, "limits": {"memory": memory}} for memory in ("1Gi", "101Ti"))
    assert "violates PodSecurity" in refusal(api, namespace, bare(resources=small))
    assert "exceeded quota: room" in refusal(api, namespace, bare(resources=large, securityContext=CONFINED))
    assert not refusal(api, namespace, bare(resources=small, securityContext=CONFINED))


def test_the_budget_of_two_routers_admits_one_eviction(api: ApiServer) -> None:
    objects = templated(api, "evictions", CHART / "examples" / "router-pods.yaml")
    budgets = [each for each in objects if each["kind"] == "PodDisruptionBudget"]
    namespace = new_namespace(api, "evictions", budgets)
    template = pod_templates(objects)["test-tandem-router"]
    for name in ("a", "b"):
        api.kubectl("create", f"--namespace={namespace}", "--filename=-", given=pod(name, template))
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        assert not api.set_status("pod", name, namespace, status)
    budget = ("poddisruptionbudget", "test-tandem-router")
    (found,) = api.objects(*budget, f"--namespace={namespace}")
    assert not api.set_status(*budget, namespace, budget_status(found, healthy=2, expected=2))

    def evict(name: str) -> str:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        return api.error("create", f"--raw={path}", "--filename=-", given=eviction)

    assert evict("a") == ""
    assert "(TooManyRequests)" in evict("b")  # HTTP status 429
    assert [each["metadata"]["name"] for each in api.objects("pods", f"--namespace={namespace}")] == ["b"]


def test_a_pool_that_breaks_a_rule_is_refused(api: ApiServer) -> None:
    spec = {"release": "test", "model": "a", "role": "decode", "replicas": 0}
    pool = {"apiVersion": "tandem.dev/v1alpha1", "kind": "Pool", "metadata": {"name": "a"}, "spec": spec}
    assert "replicas: expected at least 1 for role decode" in refusal(api, "default", pool)
    spec["role"] = "prefill"
    assert not refusal(api, "default", pool)


@pytest.mark.skipif(bool(CRDS), reason="the definitions of KUBERNETES_CRDS have rules of their own")
@pytest.mark.parametrize(("kind", "change", "said"), BROKEN)
def test_an_object_that_breaks_a_rule_is_refused(api: ApiServer, kind: str, change: Change, said: str) -> None:
    """The rules of tests/data/custom-resources.yaml, as the API server compiles and evaluates them."""
    manifest: Any = copy.deepcopy(next((each for (found, _), each in rendered(ROUTES).items() if found == kind), POOL))
    manifest["metadata"]["namespace"] = "default"
    assert not refusal(api, "default", manifest)
    change(manifest["spec"])
    assert said in refusal(api, "default", manifest)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_pods_of_what_the_api_server_returns_answer(api: ApiServer, tmp_path: Path) -> None:
    """The manifests with all defaults, run as processes: the kubelet's part."""
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(VALUES))
    namespace = new_namespace(api, "serving")
    api.helm("install", "test", str(CHART), f"--namespace={namespace}", f"--values={values}")
    pull(DEMO_MODEL)
    machines = Machines(f"tk{os.getpid() % 100000}")
    try:
        machines.build()
        with deployed(machines, released(api, namespace)) as deployment:
            deployment.start()
            head, node = deployment.pods["head"], deployment.pods["node"]
            deployment.wait(lambda: head.probe("startupProbe") and head.probe("readinessProbe"), 150.0)
            assert "Paris" in answer_of(ask(node, 8000, 8, HEAD_IP))["choices"][0]["text"]
    finally:
        machines.destroy()
