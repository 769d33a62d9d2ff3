"""Validates the chart's RayClusters against KubeRay's CRD, which is not part of this repository.

    check-crd.py ray.io_rayclusters.yaml [VALUES ...]

The CRD is the output of `kubectl get crd rayclusters.ray.io -o yaml`, or the file of a KubeRay release (.gz too).
Renders all examples and the given VALUES files. Prints one line per fault and exits 1 if there is any.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "tandem"


def closed(node: Any) -> Any:
    """Converts a structural schema of Kubernetes to a JSON Schema that refuses unknown fields."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {name: closed(each) for name, each in node.items()}
    if node.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if node.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    named = isinstance(node.get("properties"), dict)
    if named and "additionalProperties" not in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found


def schemas(definition: Path) -> dict[str, Any]:
    """JSON Schemas by apiVersion."""
    text = gzip.decompress(definition.read_bytes()) if definition.suffix == ".gz" else definition.read_bytes()
    spec = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]
    found = {}
    for version in spec["versions"]:
        schema = closed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        found[f"{spec['group']}/{version['name']}"] = schema
    return found


def faults(values: Path, known: dict[str, Any], helm: str) -> Iterator[str]:
    command = [helm, "template", "test", str(CHART), "-f", str(values)]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    clusters = [
        each for each in yaml.load_all(rendered, Loader=yaml.CSafeLoader) if each and each["kind"] == "RayCluster"
    ]
    if not clusters:
        yield f"{values.name}: expected a RayCluster, got none"
    for cluster in clusters:
        if cluster["apiVersion"] not in known:
            yield f"{values.name}: apiVersion: expected one of {', '.join(known)}, got {cluster['apiVersion']}"
            continue
        for error in jsonschema.Draft202012Validator(known[cluster["apiVersion"]]).iter_errors(cluster):
            yield f"{values.name}: {'.'.join(map(str, error.path))}: {error.message[:200]}"


def main(definition: Path, more: list[Path]) -> int:
    fetched = subprocess.run([ROOT / "scripts" / "fetch-helm.sh"], check=True, capture_output=True, text=True)
    helm = fetched.stdout.strip()
    known = schemas(definition)
    files = [*sorted((CHART / "examples").glob("*.yaml")), *more]
    found = [fault for each in files for fault in faults(each, known, helm)]
    print("\n".join(found) or f"{len(files)} values files are valid")
    return bool(found)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]]))
