"""Definitions of the kinds that the chart writes, complete enough for a real API server."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

PRESERVE, INT_OR_STRING = "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"
MOST_ITEMS, MOST_CHARACTERS = 64, 4096  # bound the estimated cost of a CEL rule, which the API server limits
APPROVAL = "api-approved.kubernetes.io"
IMPLIED = ("apiVersion", "kind", "metadata")


def _open(**properties: Manifest) -> Manifest:
    """An object that keeps fields beside the named ones. CEL rules read named ones only."""
    return {"type": "object", PRESERVE: True, **({"properties": properties} if properties else {})}


def _list_of(items: Manifest) -> Manifest:
    return {"type": "array", "maxItems": MOST_ITEMS, "items": items}


NAME: Manifest = {"type": "string", "maxLength": MOST_CHARACTERS}
POD_TEMPLATE = _open(spec=_open(containers=_list_of(_open(env=_list_of(_open(name=NAME))))))


def complete(trimmed: Manifest) -> Manifest:
    """A definition of tests/data/custom-resources.yaml, with what an API server demands beside it."""
    (version,) = trimmed["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    parts = {name: each if name in IMPLIED else _structural(name, each) for name, each in schema["properties"].items()}
    served = version | {"served": True, "storage": True, "schema": {"openAPIV3Schema": schema | {"properties": parts}}}
    group, kind = kind_of(trimmed)
    singular = kind.lower()
    plural = f"{singular[:-1]}ies" if singular.endswith("y") else f"{singular}s"
    annotations = {APPROVAL: "unapproved, trimmed for tests"} if group.endswith(".k8s.io") else {}
    names = {"kind": kind, "listKind": f"{kind}List", "singular": singular, "plural": plural}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": annotations},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }


def _structural(name: str, node: Manifest) -> Manifest:
    """Gives a node and all below it a type, a bound and contents. Only enumerations come without a type."""
    if INT_OR_STRING in node:
        return node
    found = {"type": "string", **node}
    match found["type"]:
        case "string":
            return found if "enum" in found else NAME | found
        case "array":
            found = _list_of(_open()) | found
            return found | {"items": _structural("", found["items"])}
        case "object" if name == "template":
            return found | POD_TEMPLATE
        case "object" if "properties" in found:
            return found | {"properties": {key: _structural(key, each) for key, each in found["properties"].items()}}
        case "object" if "additionalProperties" in found:
            return found | {"additionalProperties": _structural("", found["additionalProperties"])}
        case "object":
            return found | _open()
    return found


def of_cluster(folder: Path) -> Iterator[Manifest]:
    """Those in YAML files (.gz too), as `kubectl get crd -o yaml` prints them or a release ships them: without what
    their cluster added, and without webhooks, which nothing serves here."""
    for file in sorted(path for path in folder.iterdir() if {".yaml", ".yml"} & set(path.suffixes)):
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for document in yaml.load_all(text, Loader=yaml.CSafeLoader):
            for each in document.get("items", [document]) if document else ():
                if each["kind"] == "CustomResourceDefinition":
                    annotations = each["metadata"].get("annotations", {})
                    kept = {APPROVAL: annotations[APPROVAL]} if APPROVAL in annotations else {}
                    metadata = {"name": each["metadata"]["name"], "annotations": kept}
                    spec = {name: part for name, part in each["spec"].items() if name != "conversion"}
                    yield {"apiVersion": each["apiVersion"], "kind": each["kind"], "metadata": metadata, "spec": spec}


def kind_of(definition: Manifest) -> tuple[str, str]:
    """Group and kind."""
    return definition["spec"]["group"], definition["spec"]["names"]["kind"]


def chosen(trimmed: list[Manifest], folder: Path | None) -> list[Manifest]:
    """Of each kind in `trimmed`: its definition in `folder`, else the trimmed one, completed."""
    theirs = {kind_of(each): each for each in of_cluster(folder)} if folder else {}
    return [theirs.get(kind_of(each)) or complete(each) for each in trimmed]
