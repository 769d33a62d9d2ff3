"""What a cluster has beside its API server: what controllers make of a release and write, and what pods need."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from typing import Any

Manifest = dict[str, Any]

REFERENCES = {
    "secret": "Secret",
    "secretRef": "Secret",
    "secretKeyRef": "Secret",
    "configMap": "ConfigMap",
    "configMapRef": "ConfigMap",
}


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def finished(job: Manifest) -> Manifest:
    """The status of a Job whose pods have succeeded. Kubernetes 1.32 and newer demand both conditions and times."""
    time = now()
    conditions = [
        {"type": each, "status": "True", "reason": "CompletionsReached", "lastTransitionTime": time}
        for each in ("SuccessCriteriaMet", "Complete")
    ]
    succeeded = job["spec"].get("completions", 1)
    counted = {"startTime": time, "completionTime": time, "succeeded": succeeded, "uncountedTerminatedPods": {}}
    return counted | {"conditions": conditions}


def budget_status(budget: Manifest, *, healthy: int, expected: int) -> Manifest:
    """As the disruption controller computes it from `maxUnavailable`, a number."""
    wanted, generation = max(0, expected - budget["spec"]["maxUnavailable"]), budget["metadata"]["generation"]
    allowed = max(0, healthy - wanted)
    condition = {
        "type": "DisruptionAllowed",
        "status": str(allowed > 0),
        "reason": "SufficientPods" if allowed else "InsufficientPods",
        "message": "",
        "lastTransitionTime": now(),
        "observedGeneration": generation,
    }
    counted = {"currentHealthy": healthy, "desiredHealthy": wanted, "expectedPods": expected}
    return {"disruptionsAllowed": allowed, "observedGeneration": generation, "conditions": [condition], **counted}


def pod_templates(objects: Iterable[Manifest]) -> dict[str, Manifest]:
    """Of Deployments, Jobs and RayClusters, and Pods themselves, by the name of a pod."""
    found = {}
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] in ("Deployment", "Job"):
            found[name] = spec["template"]
        elif each["kind"] == "Pod":
            found[name] = each
        elif each["kind"] == "RayCluster":
            found[f"{name}-head"] = spec["headGroupSpec"]["template"]
            found |= {f"{name}-{group['groupName']}": group["template"] for group in spec.get("workerGroupSpecs", ())}
    return found


def pod(name: str, template: Manifest) -> Manifest:
    metadata = {key: each for key, each in template["metadata"].items() if key in ("labels", "annotations")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": template["spec"]}


def needed(objects: list[Manifest]) -> list[Manifest]:
    """Empty Secrets and ConfigMaps, and priority classes, that objects name and the release does not make."""
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    classes = {template["spec"].get("priorityClassName") for template in pod_templates(objects).values()} - {None}
    found: list[Manifest] = [
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
        for kind, name in sorted(set(_references(objects)) - made)
    ]
    for name in sorted(classes):
        metadata = {"name": name}
        found.append({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": metadata, "value": 1})
    return found


def _references(node: Any) -> Iterator[tuple[str, str]]:
    for key, each in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key in REFERENCES and isinstance(each, dict):
            yield REFERENCES[key], each.get("name") or each["secretName"]
        yield from _references(each)


def lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths of fields that the API server dropped. Values may come back in another form, and empty ones may go."""
    if isinstance(written, dict):
        for name, each in written.items():
            if each and name not in read:
                yield f"{path}.{name}"
            elif each:
                yield from lost(each, read[name], f"{path}.{name}")
    elif isinstance(written, list):
        if len(written) != len(read):
            yield path
        for index, each in enumerate(written[: len(read)]):
            yield from lost(each, read[index], f"{path}[{index}]")
