"""checkov, a linter of others' making, over every pod and policy that the secured example would run."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "tandem"
# Each with why it is not followed.
EXEMPT = {
    "CKV_K8S_11": "CPU limits throttle token latency while cores idle; requests place the pods",
    "CKV_K8S_15": "image.pullPolicy is the user's; a pinned tag or digest need not be pulled again",
    "CKV_K8S_35": "the Redis password is part of a URL; keys and certificates are files",
    "CKV_K8S_43": "image.digest is the user's to pin",
}
TEST_POD = {"CKV_K8S_8", "CKV_K8S_9"}  # `helm test` runs to its end: nothing to probe

Manifest = dict[str, Any]


def as_pods(manifests: dict[tuple[str, str], Manifest]) -> list[Manifest]:
    """Linters know no RayCluster: its pod templates become Pods."""
    found = []
    for (kind, _), manifest in manifests.items():
        if kind != "RayCluster":
            found.append(manifest)
            continue
        spec = manifest["spec"]
        for name, group in (("head", spec["headGroupSpec"]), ("node", spec["workerGroupSpecs"][0])):
            pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(group["template"])}
            pod["metadata"]["name"] = name
            found.append(pod)
    for manifest in found:
        manifest["metadata"].setdefault("namespace", "serving")
    return found


@pytest.fixture(scope="module")
def checkov() -> str:
    found = subprocess.run([ROOT / "scripts" / "fetch-checkov.sh"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def failures(checkov: str, folder: Path, manifests: list[Manifest]) -> set[tuple[str, str]]:
    """(check, resource)"""
    (folder / "all.yaml").write_text(yaml.safe_dump_all(manifests))
    command = [checkov, "--framework", "kubernetes", "-d", str(folder), "--output", "json", "--skip-download"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100, done.stderr
    return {(check["check_id"], check["resource"]) for check in report["results"]["failed_checks"]}


def test_the_linter_finds_nothing_but_what_was_decided(
    checkov: str, render: Callable[..., dict[tuple[str, str], Manifest]], tmp_path: Path
) -> None:
    manifests = as_pods(render("--values", str(CHART / "examples" / "secured.yaml")))
    found = {
        (check, resource)
        for check, resource in failures(checkov, tmp_path, manifests)
        if check not in EXEMPT and not (check in TEST_POD and "test-completion" in resource)
    }
    assert found == set()


def test_the_linter_would_find_a_privileged_container(
    checkov: str, render: Callable[..., dict[tuple[str, str], Manifest]], tmp_path: Path
) -> None:
    manifests = as_pods(render("--set", "securityContext.privileged=true"))
    assert "CKV_K8S_16" in {check for check, _ in failures(checkov, tmp_path, manifests)}
