"""Validates the chart's objects against CustomResourceDefinitions from elsewhere, and their CEL rules.

    check-crd.py CRDS [VALUES ...] [--from VALUES]

CRDS: the output of `kubectl get crd rayclusters.ray.io -o yaml`, of several or all of a cluster, or the file of a
release (.gz too): KubeRay, Gateway API and its Inference Extension, cert-manager, the Prometheus operator.
Renders all examples and the given VALUES files, and checks each object that CRDS define. --from VALUES: of the running
release; the given files are then checked as changes of it, with the rules for updates (`oldSelf`).
Prints one line per fault and exits 1 if there is any.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.testing.crd import Definition, definitions

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "tandem"

Key = tuple[str, str, str]  # apiVersion, kind, name


def read(file: Path) -> dict[tuple[str, str], Definition]:
    found = definitions(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())
    if not found:
        sys.exit(f"{file}: expected CustomResourceDefinitions, got none; kubectl get crd -o yaml prints them")
    return found


def rendered(values: Path, helm: str) -> dict[Key, Any]:
    command = [helm, "template", "test", str(CHART), "-f", str(values)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{values}: {result.stderr.strip()}")
    objects = [each for each in yaml.load_all(result.stdout, Loader=yaml.CSafeLoader) if each]
    return {(each["apiVersion"], each["kind"], each["metadata"]["name"]): each for each in objects}


def faults(
    objects: Mapping[Key, Any], former: Mapping[Key, Any], known: Mapping[tuple[str, str], Definition]
) -> Iterator[str]:
    kinds = {kind: version for version, kind in known}
    for (version, kind, name), manifest in objects.items():
        if (version, kind) in known:
            for fault in known[version, kind].faults(manifest, former.get((version, kind, name))):
                yield f"{kind} {name}: {fault}"
        elif kind in kinds:
            yield f"{kind} {name}: apiVersion: expected one that the file defines, such as {kinds[kind]}, got {version}"


def main(arguments: list[str]) -> int:
    described, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=described, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("crds", type=Path)
    parser.add_argument("values", type=Path, nargs="*")
    parser.add_argument("--from", type=Path, dest="former", metavar="VALUES")
    given = parser.parse_args(arguments)
    fetched = subprocess.run([ROOT / "scripts" / "fetch-helm.sh"], check=True, capture_output=True, text=True)
    helm, known = fetched.stdout.strip(), read(given.crds)
    former = rendered(given.former, helm) if given.former else {}
    examples = sorted((CHART / "examples").glob("*.yaml"))
    found, checked = [], set[str]()
    for file in [*examples, *given.values]:
        objects = rendered(file, helm)
        checked |= {kind for version, kind, _ in objects if (version, kind) in known}
        found += [f"{file.name}: {fault}" for fault in faults(objects, {} if file in examples else former, known)]
    if not checked:
        found.append(f"{given.crds}: expected definitions of kinds that the chart writes, such as RayCluster, got none")
    print(
        "\n".join(found) or f"{len(examples) + len(given.values)} values files are valid: {', '.join(sorted(checked))}"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
