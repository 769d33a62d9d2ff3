"""The overlays of deploy/kustomize, built by the real kubectl: the chart's objects, and what an overlay changes."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
REGISTRY = "registry.example.com"
KEYS = "tandem-keys"

Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]
Build = Callable[[str], Manifests]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, with the file of keys that an operator makes."""
    root = tmp_path_factory.mktemp("kustomize")
    for name in ("deploy/kustomize", "helm"):
        shutil.copytree(ROOT / name, root / name)
    (root / "deploy" / "kustomize" / "router-pods" / "keys.yaml").write_text("keys: []\n")
    return root / "deploy" / "kustomize"


@pytest.fixture(scope="module")
def build(folder: Path, helm: str) -> Build:
    fetched = subprocess.run(
        [ROOT / "scripts" / "fetch-helm.sh", "kubectl"], check=True, capture_output=True, text=True
    )

    def run(overlay: str) -> Manifests:
        command = [fetched.stdout.strip(), "kustomize", "--enable-helm", "--helm-command", helm, str(folder / overlay)]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        documents = yaml.load_all(built.stdout, Loader=yaml.CSafeLoader)
        return {(each["kind"], each["metadata"]["name"]): each for each in documents}

    return run


@pytest.fixture(scope="module")
def rendered(helm: str) -> Build:
    """What helm makes of the overlay's values."""

    def run(overlay: str) -> Manifests:
        command = [helm, "template", "demo", str(ROOT / "helm" / "tandem"), "--namespace", "tandem", "--skip-tests"]
        command += ["--values", str(KUSTOMIZE / overlay / "chart" / "values.yaml")]
        made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        documents = yaml.load_all(made, Loader=yaml.CSafeLoader)
        return {(each["kind"], each["metadata"]["name"]): each for each in documents if each}

    return run


def replaced(value: Any, changes: dict[str, str]) -> Any:
    """With other strings, wherever they are."""
    if isinstance(value, dict):
        return {key: replaced(each, changes) for key, each in value.items()}
    if isinstance(value, list):
        return [replaced(each, changes) for each in value]
    return changes.get(value, value) if isinstance(value, str) else value


IMAGES = {f"{name}:0.1.0": f"{REGISTRY}/{name}:0.1.0" for name in ("tandem", "tandem-router")}


def test_one_pod_is_the_chart_with_another_image(build: Build, rendered: Build) -> None:
    built = build("one-pod")
    namespace = built.pop(("Namespace", "tandem"))
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    assert built == replaced(rendered("one-pod"), IMAGES)
    assert {each["metadata"]["namespace"] for each in built.values()} == {"tandem"}


def test_router_pods_are_the_chart_with_generated_keys_and_patches(build: Build, rendered: Build) -> None:
    built = build("router-pods")
    del built["Namespace", "tandem"]
    (keys,) = (name for kind, name in built if kind == "Secret")
    assert keys.startswith(f"{KEYS}-"), "another content, another name"
    assert built.pop(("Secret", keys))["data"].keys() == {"keys.yaml"}
    wanted = copy.deepcopy(replaced(rendered("router-pods"), IMAGES))
    wanted["Deployment", "demo-tandem-router"]["spec"]["minReadySeconds"] = 10
    wanted["RayCluster", "demo-tandem"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "serving"
    router = wanted["Deployment", "demo-tandem-router"]["spec"]["template"]["spec"]
    (volume,) = (each for each in router["volumes"] if each["name"] == "keys")
    volume["secret"]["secretName"] = keys
    assert built == wanted


def test_a_ray_cluster_gets_the_name_of_a_generated_secret(folder: Path, build: Build) -> None:
    overlay = folder / "keys-in-the-head"
    shutil.copytree(folder / "one-pod", overlay)
    values = overlay / "chart" / "values.yaml"
    values.write_text(
        f"{values.read_text()}auth: {{existingSecret: {KEYS}}}\ntest: {{apiKeySecret: {{name: unused}}}}\n"
    )
    made = {"secretGenerator": [{"name": KEYS, "literals": ["keys.yaml=none"]}]}
    with (overlay / "kustomization.yaml").open("a") as file:
        file.write(yaml.safe_dump(made))
    built = build(overlay.name)
    (name,) = (name for kind, name in built if kind == "Secret")
    head = built["RayCluster", "demo-tandem"]["spec"]["headGroupSpec"]["template"]["spec"]
    assert name in {volume.get("secret", {}).get("secretName") for volume in head["volumes"]}


def test_values_that_the_chart_refuses_are_refused(folder: Path, build: Build) -> None:
    overlay = folder / "wrong"
    shutil.copytree(folder / "one-pod", overlay)
    with (overlay / "chart" / "values.yaml").open("a") as file:
        file.write("nodes: {}\n")
    with pytest.raises(AssertionError, match="nodes"):
        build(overlay.name)
