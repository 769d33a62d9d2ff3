"""Every object of every example: its schema, the rules that platform teams ask for, and what an upgrade does to it."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cluster.testing.crd import definitions
from cluster.testing.kuberay import Outcome, outcome

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data"
OLDEST, NEWEST = "1.27", "1.37"
OTHERS = definitions((DATA / "custom-resources.yaml").read_text())
POOLS = ROOT / "helm" / "tandem" / "files" / "pools.tandem.dev.yaml"
CUSTOM = OTHERS | definitions(POOLS.read_text())
CUSTOM_KINDS = {kind for _, kind in CUSTOM}
IMMUTABLE = {
    "Deployment": ("spec.selector",),
    "Service": ("spec.clusterIP",),
    "PersistentVolumeClaim": ("spec",),
}

Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]


def pods(manifests: Manifests) -> Iterator[tuple[str, Manifest]]:
    """Every pod that would run, as a Pod, whatever makes it."""
    for (kind, name), manifest in manifests.items():
        spec = manifest.get("spec", {})
        if kind == "Pod":
            yield name, manifest
        elif kind == "Deployment":
            yield name, _pod(name, spec["template"])
        elif kind == "RayCluster":
            yield "head", _pod("head", spec["headGroupSpec"]["template"])
            yield from ((group["groupName"], _pod("node", group["template"])) for group in spec["workerGroupSpecs"])


def _pod(name: str, template: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template), "metadata": {"name": name}}


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def check_custom(manifests: Manifests) -> None:
    """Fields, types and CEL rules."""
    for (kind, name), manifest in manifests.items():
        if kind in CUSTOM_KINDS:
            assert not list(CUSTOM[manifest["apiVersion"], kind].faults(manifest)), name


def check_native(manifests: Manifests, version: str) -> None:
    native = [manifest for (kind, _), manifest in manifests.items() if kind not in CUSTOM_KINDS]
    for manifest in [*native, *(pod for _, pod in pods(manifests))]:
        check_one(json.dumps(manifest), version)


@functools.cache  # examples share most of their objects, and the library reads its schema for each
def check_one(manifest: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


def test_every_object_is_what_kubernetes_and_kuberay_expect(example: Manifests) -> None:
    check_native(example, NEWEST)
    check_custom(example)


def test_the_oldest_kubernetes_that_the_chart_names_knows_every_field(render: Callable[..., Manifests]) -> None:
    check_native(render("--values", str(ROOT / "helm" / "tandem" / "examples" / "secured.yaml")), OLDEST)


def test_a_misspelt_field_of_a_pod_or_a_ray_cluster_would_be_found(render: Callable[..., Manifests]) -> None:
    cluster = render()["RayCluster", "test-tandem"]
    head = dict(pods({("RayCluster", "test-tandem"): cluster}))["head"]
    head["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(head, NEWEST, strict=True)
    cluster["spec"]["workerGroupSpec"] = []
    with pytest.raises(AssertionError, match="workerGroupSpec"):
        check_custom({("RayCluster", "test-tandem"): cluster})


def test_no_pod_is_root_writes_its_root_file_system_or_knows_the_api_server(example: Manifests) -> None:
    for name, pod in pods(example):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec), name
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert "privileged" not in context, name


def test_every_container_says_what_it_needs_and_pins_its_image(example: Manifests) -> None:
    for name, pod in pods(example):
        for container in containers(pod):
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), name
            assert resources["limits"]["memory"], name
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            assert tag not in ("", "latest"), container["image"]


def test_what_serves_is_probed(example: Manifests) -> None:
    for name, pod in pods(example):
        if name != "test-tandem-test-completion":
            for container in pod["spec"]["containers"]:
                assert {"readinessProbe", "livenessProbe"} <= container.keys(), name


def test_every_pod_may_pull_from_a_registry_that_asks_who_pulls(render: Callable[..., Manifests]) -> None:
    example = ROOT / "helm" / "tandem" / "examples" / "router-pods.yaml"
    manifests = render("--values", str(example), "--set", "imagePullSecrets[0].name=registry")
    (job,) = (manifest["spec"]["template"]["spec"] for (kind, _), manifest in manifests.items() if kind == "Job")
    specs = [job, *(pod["spec"] for _, pod in pods(manifests))]
    assert len(specs) == 6, "head, nodes, routers, Valkey, the rolling Job, helm test"
    assert all(spec["imagePullSecrets"] == [{"name": "registry"}] for spec in specs)


def test_a_folder_of_the_machine_is_mounted_only_when_asked_for(example: Manifests) -> None:
    assert "hostPath" not in str([pod["spec"].get("volumes") for _, pod in pods(example)])


def test_a_hostpath_is_a_choice(render: Callable[..., Manifests]) -> None:
    head = dict(pods(render("--set", "models.hostPath=/srv/models")))["head"]
    (models,) = [volume for volume in head["spec"]["volumes"] if volume["name"] == "models"]
    assert models["hostPath"] == {"path": "/srv/models", "type": "Directory"}


def test_everything_is_denied_but_what_is_named(example: Manifests) -> None:
    policies = [manifest["spec"] for (kind, _), manifest in example.items() if kind == "NetworkPolicy"]
    denied = [spec for spec in policies if not spec.get("ingress") and not spec.get("egress")]
    assert [spec["policyTypes"] for spec in denied] == [["Ingress", "Egress"]]
    (deny,) = denied
    for _, pod in pods(example):
        labels = _labels_of(example, pod)
        assert deny["podSelector"]["matchLabels"].items() <= labels.items()
    for spec in policies:
        for rule in spec.get("ingress", []):
            assert rule.get("from") or rule.get("ports"), "a rule that lets everything in"
        for rule in spec.get("egress", []):
            assert rule.get("to") or rule.get("ports"), "a rule that lets everything out"


def _labels_of(manifests: Manifests, pod: Manifest) -> dict[str, str]:
    """Labels of the object itself, or of the template that makes it."""
    if "labels" in pod["metadata"]:
        labels: dict[str, str] = pod["metadata"]["labels"]
        return labels
    return {"app.kubernetes.io/instance": "test", "app.kubernetes.io/part-of": "tandem"}


def test_no_argument_of_a_container_has_a_secret(example: Manifests) -> None:
    """Kubernetes puts a variable's value in place of $(NAME) in commands, where every process of the pod reads it."""
    for name, pod in pods(example):
        for container in containers(pod):
            variables = container.get("env", [])
            secret = {each["name"] for each in variables if "secretKeyRef" in each.get("valueFrom", {})}
            secret |= {each["name"] for each in variables if any(f"$({known})" in str(each) for known in secret)}
            probes = [container.get(key) for key in ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle")]
            said = str([container.get("command"), container.get("args"), probes])
            assert [each for each in secret if f"$({each})" in said] == [], name


@pytest.mark.parametrize("values", [None, "valkey", "two-racks"])
def test_an_upgrade_changes_nothing_that_kubernetes_forbids(
    render: Callable[..., Manifests], values: str | None
) -> None:
    """tests/data/chart-0.1.0: what the former version of the chart rendered."""
    former_name = {None: "defaults", "valkey": "valkey", "two-racks": "valkey"}[values]
    former = _parse(DATA / "chart-0.1.0" / f"{former_name}.yaml")
    examples = ROOT / "helm" / "tandem" / "examples"
    now = render(*(["--values", str(examples / f"{values}.yaml")] if values else []))
    for key in former.keys() & now.keys():
        for path in IMMUTABLE.get(key[0], ()):
            assert _at(former[key], path) == _at(now[key], path), f"{key}: {path} cannot be changed"
    gone = former.keys() - now.keys()
    assert gone == {("NetworkPolicy", "test-tandem")}, "what an upgrade deletes; the policy became several"


def test_a_chart_of_another_version_restarts_nothing_by_that_alone(
    helm: str, render: Callable[..., Manifests], tmp_path: Path
) -> None:
    arguments = ("--values", str(ROOT / "helm" / "tandem" / "examples" / "valkey.yaml"), "--set", "image.tag=0.1.0")
    newer = tmp_path / "tandem"
    shutil.copytree(ROOT / "helm" / "tandem", newer)
    about = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "9.9.9", "appVersion": "9.9.9"}))
    command = [helm, "template", "test", str(newer), "--namespace", "serving", *arguments]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(rendered) if each}
    assert after["RayCluster", "test-tandem"]["metadata"]["labels"]["helm.sh/chart"] == "tandem-9.9.9"
    assert outcome(render(*arguments), after) == Outcome()


def _parse(path: Path) -> Manifests:
    manifests = [manifest for manifest in yaml.safe_load_all(path.read_text()) if manifest]
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


def _at(manifest: Manifest, path: str) -> Any:
    found: Any = manifest
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def test_every_object_names_the_releases_namespace(example: Manifests) -> None:
    """For tools that apply a render without helm: Kustomize adds no namespace to what a chart made."""
    every = [manifest["metadata"] for manifest in example.values()]
    own = [metadata for metadata in every if "helm.sh/chart" in metadata.get("labels", {})]  # not extraObjects
    assert len(own) > 8
    assert {metadata.get("namespace") for metadata in own} == {"serving"}
