"""The trimmed definitions, completed for an API server. No API server is needed here."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from cluster.testing.chart_edits import rendered
from cluster.testing.crd import Definition
from tests.kubernetes.definitions import INT_OR_STRING, PRESERVE, Manifest, chosen, complete
from tests.unit.deploy.test_chart_objects import DATA, NEWEST
from tests.unit.deploy.test_crd import BROKEN, ROUTES

TRIMMED = yaml.safe_load((DATA / "custom-resources.yaml").read_text())["items"]
COMPLETED = [complete(each) for each in TRIMMED]


def schema_of(definition: Manifest) -> Manifest:
    schema: Manifest = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(node: Manifest) -> Iterator[Manifest]:
    yield node
    parts = [*node.get("properties", {}).values(), node.get("items"), node.get("additionalProperties")]
    for each in filter(None, parts):
        yield from nodes(each)


@pytest.mark.parametrize("definition", COMPLETED, ids=lambda each: each["metadata"]["name"])
def test_a_completed_definition_is_structural_and_bounded(definition: Manifest) -> None:
    kubernetes_validate.validate(definition, NEWEST, strict=True)
    spec, metadata = definition["spec"], definition["metadata"]
    assert metadata["name"] == f"{spec['names']['plural']}.{spec['group']}"
    assert bool(metadata["annotations"]) == spec["group"].endswith(".k8s.io"), "protected groups need an approval"
    whole = schema_of(definition)
    assert whole["properties"]["metadata"] == {"type": "object"}, "an API server allows no more"
    for node in nodes(whole["properties"]["spec"]):
        kind = node.get("type")
        assert bool(kind) != bool(node.get(INT_OR_STRING))
        assert kind != "string" or "enum" in node or node["maxLength"]
        assert kind != "array" or (node["items"] and node["maxItems"])
        assert kind != "object" or {"properties", "additionalProperties", PRESERVE} & node.keys(), (
            "fields would be lost"
        )


def test_rules_can_read_the_pod_templates_of_a_ray_cluster() -> None:
    """CEL of an API server reads no field that a schema only preserves."""
    head = schema_of(COMPLETED[0])["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]["template"]
    container = head["properties"]["spec"]["properties"]["containers"]["items"]
    assert container["properties"]["env"]["items"]["properties"]["name"]["type"] == "string"


def test_completed_definitions_take_what_the_chart_writes() -> None:
    kinds = {each["spec"]["names"]["kind"]: Definition.of(schema_of(each)) for each in COMPLETED}
    objects = [each for (kind, _), each in rendered(ROUTES).items() if kind in kinds]
    assert {each["kind"] for each in objects} >= {kind for kind, _, _ in BROKEN} - {"InferencePool"}
    assert [fault for each in objects for fault in kinds[each["kind"]].faults(each)] == []


def test_definitions_of_a_cluster_replace_trimmed_ones_without_what_the_cluster_added(tmp_path: Path) -> None:
    theirs = {**COMPLETED[0], "status": {"storedVersions": ["v1"]}}
    theirs["metadata"] = {**theirs["metadata"], "resourceVersion": "7", "annotations": {"a": "b"}}
    theirs["spec"] = {**theirs["spec"], "conversion": {"strategy": "Webhook"}, "versions": []}
    other = {**COMPLETED[1], "spec": {**COMPLETED[1]["spec"], "group": "other.example.com"}}
    listed = yaml.safe_dump({"kind": "List", "items": [theirs, other]})
    (tmp_path / "crds.yaml.gz").write_bytes(gzip.compress(listed.encode()))
    (tmp_path / "README").write_text("no YAML: [")
    found = chosen(TRIMMED, tmp_path)
    assert found[0] == COMPLETED[0] | {"spec": {**COMPLETED[0]["spec"], "versions": []}}
    assert found[1:] == COMPLETED[1:]
