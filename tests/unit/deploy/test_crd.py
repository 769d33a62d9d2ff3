"""Definitions of custom resources, with their CEL rules, and what the chart writes against them."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.testing.chart_edits import rendered
from cluster.testing.crd import RULES, Definition, definitions
from tests.unit.deploy.conftest import ROOT
from tests.unit.deploy.test_chart_objects import CUSTOM, DATA, OTHERS

Change = Callable[[dict[str, Any]], object]

SPEC = {
    "mode": {"type": "string", RULES: [{"rule": "self == oldSelf", "message": "it is immutable"}]},
    "least": {"type": "integer", "default": 1},
    "most": {"type": "integer"},
    "ratio": {"type": "number", RULES: [{"rule": "self >= 0.5", "message": "expected half or more"}]},
    "size": {"x-kubernetes-int-or-string": True},
    "namespace": {"type": "string", RULES: [{"rule": "size(self) < 4"}]},
    "labels": {"type": "object", "additionalProperties": {"type": "string", RULES: [{"rule": "self != ''"}]}},
    "ports": {
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "port": {"type": "integer", RULES: [{"rule": "self >= oldSelf", "message": "a port never falls"}]},
            },
        },
    },
    "plain": {
        "type": "array",
        "items": {"type": "integer", RULES: [{"rule": "self == oldSelf", "message": "never: items have no names"}]},
    },
}
WHOLE = [
    {
        "rule": "self.least <= self.most",
        "messageExpression": "'expected at most ' + string(self.most)",
        "fieldPath": ".least",
    },
    {"rule": "!has(self.__namespace__) || self.__namespace__ != 'all'", "message": "expected one namespace"},
]
THING = Definition.of(
    {
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "spec": {"type": "object", "required": ["most"], "properties": SPEC, RULES: WHOLE},
        },
    }
)


def faults(former: dict[str, Any] | None = None, **spec: Any) -> list[str]:
    def thing(fields: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": "a/v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": {"most": 3, **fields}}

    return list(THING.faults(thing(spec), None if former is None else thing(former)))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, None),
        ({"least": 3, "size": "a", "ratio": 1, "namespace": "one", "labels": {"a.b/c": "d"}}, None),
        ({"least": 4}, "spec.least: expected at most 3"),
        ({"ratio": 0.25}, "spec.ratio: expected half or more"),
        ({"namespace": "all"}, "spec: expected one namespace"),
        ({"namespace": "long"}, "spec.namespace: failed rule: size(self) < 4"),
        ({"labels": {"a.b": ""}}, "spec.labels.a.b: failed rule: self != ''"),
        ({"more": 1}, "spec: Additional properties are not allowed ('more' was unexpected)"),
        ({"most": "3"}, "spec.most: '3' is not of type 'integer'"),
    ],
)
def test_fields_types_and_rules_are_checked_with_the_path(spec: dict[str, Any], said: str | None) -> None:
    assert faults(**spec) == ([said] if said else [])


@pytest.mark.parametrize(
    ("former", "spec", "said"),
    [
        ({"mode": "a"}, {"mode": "a"}, None),
        ({}, {"mode": "a"}, None),  # what is new has nothing to differ from
        ({"mode": "a"}, {}, None),
        ({"mode": "a"}, {"mode": "b"}, "spec.mode: it is immutable"),
        (
            {"ports": [{"name": "a", "port": 5}, {"name": "b", "port": 7}]},
            {"ports": [{"name": "b", "port": 6}, {"name": "a", "port": 6}]},
            "spec.ports[0].port: a port never falls",
        ),
        ({"plain": [1]}, {"plain": [2]}, None),
    ],
)
def test_rules_about_changes_hold_for_updates(former: dict[str, Any], spec: dict[str, Any], said: str | None) -> None:
    assert faults(former, **spec) == ([said] if said else [])
    assert faults(**spec) == []


@pytest.mark.parametrize(
    ("rule", "said"), [("isURL(self.x)", "undeclared reference to 'isURL'"), ("self.?x == 1", "self.?x"), ("1", "")]
)
def test_a_rule_that_cannot_be_evaluated_is_named(rule: str, said: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, RULES: [{"rule": rule}]}
    found = list(Definition.of(schema).faults({"x": "a"}))
    assert len(found) == (1 if said else 0)
    assert all(f"expected a rule that can be evaluated, got {rule}" in each and said in each for each in found)


def test_definitions_are_read_from_what_kubectl_prints() -> None:
    text = (DATA / "custom-resources.yaml").read_text()
    (listed,) = yaml.safe_load_all(text)
    separate = "---\n".join(yaml.safe_dump(each) for each in listed["items"])
    assert definitions(separate).keys() == definitions(text).keys() == OTHERS.keys()
    assert ("gateway.networking.k8s.io/v1", "HTTPRoute") in OTHERS


ROUTES = (
    "gateway.enabled=true,gateway.parentRefs[0].name=edge,gateway.hostnames[0]=a.example.com,"
    "gateway.grpcHostnames[0]=b.example.com,gateway.backendTls.caConfigMap=ca,monitoring.podMonitor.enabled=true,"
    "monitoring.serviceMonitor.enabled=true,monitoring.prometheusRule.enabled=true"
)
POOL = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "test-tandem"},
    "spec": {
        "selector": {"matchLabels": {"a": "b"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "a", "port": {"number": 1}},
    },
}


def head(spec: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    return container


def twice(spec: dict[str, Any], name: str) -> None:
    spec[name].append(copy.deepcopy(spec[name][0]))


BROKEN: list[tuple[str, Change, str]] = [
    ("RayCluster", lambda spec: twice(spec, "workerGroupSpecs"), "KubeRay tells groups by their names"),
    ("RayCluster", lambda spec: spec["workerGroupSpecs"][0].update(minReplicas=99), "minReplicas of at most"),
    ("RayCluster", lambda spec: spec.update(enableInTreeAutoscaling=True), "replicas are the autoscaler's"),
    ("RayCluster", lambda spec: head(spec)["env"].append({"name": "REDIS_PASSWORD"}), "variables of Redis itself"),
    (
        "RayCluster",
        lambda spec: (spec.pop("gcsFaultToleranceOptions"), head(spec)["env"].append({"name": "RAY_REDIS_ADDRESS"})),
        "gcsFaultToleranceOptions instead of RAY_REDIS_ADDRESS",
    ),
    ("RayCluster", lambda spec: spec["gcsFaultToleranceOptions"]["redisUsername"].clear(), "one of value and"),
    ("RayCluster", lambda spec: spec["headGroupSpec"]["rayStartParams"].update(labels="a=b"), "fields of its own"),
    (
        "RayCluster",
        lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"].update(containers=[]),
        "expects Ray's container",
    ),
    ("HTTPRoute", lambda spec: twice(spec, "parentRefs"), "a parent is named twice"),
    ("HTTPRoute", lambda spec: spec["rules"][0]["backendRefs"][0].pop("port"), "a Service needs a port"),
    ("BackendTLSPolicy", lambda spec: twice(spec, "targetRefs"), "a target is named twice"),
    ("BackendTLSPolicy", lambda spec: spec["validation"].pop("caCertificateRefs"), "one of caCertificateRefs and"),
    ("InferencePool", lambda spec: twice(spec, "targetPorts"), "a port is named twice"),
    ("InferencePool", lambda spec: spec["endpointPickerRef"].pop("port"), "a Service needs a port"),
    ("Certificate", lambda spec: spec.update(dnsNames=[], uris=[]), "a name in a certificate"),
    ("Certificate", lambda spec: spec["privateKey"].update(size=2048), "a size that ECDSA has"),
    ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].pop("scheme"), "tlsConfig is for https"),
    ("PrometheusRule", lambda spec: twice(spec, "groups"), "a group is named twice"),
    ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update(alert="A", record="b"), "one of alert and"),
    (
        "PrometheusRule",
        lambda spec: spec["groups"][0]["rules"].append({"record": "a", "expr": 1, "for": "5m"}),
        "neither annotations nor a time",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "said"), BROKEN)
def test_an_object_that_breaks_a_rule_is_found(kind: str, change: Change, said: str) -> None:
    objects = [each for (found, _), each in rendered(ROUTES).items() if found == kind] or [POOL]
    manifest: Any = copy.deepcopy(objects[0])
    definition = CUSTOM[manifest["apiVersion"], kind]
    assert not list(definition.faults(manifest))
    change(manifest["spec"])
    (fault,) = definition.faults(manifest)
    assert said in fault


def test_a_name_that_kuberay_refuses_is_found() -> None:
    manifest: Any = copy.deepcopy(rendered(ROUTES)["RayCluster", "test-tandem"])
    manifest["metadata"]["name"] = "7b"
    assert list(CUSTOM["ray.io/v1", "RayCluster"].faults(manifest)) == [
        "object: KubeRay expects a name that Services can have"
    ]


def test_every_rule_has_an_object_that_breaks_it() -> None:
    def messages(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (each["message"] for each in node.get(RULES, ()))
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from messages(each)

    known = set(messages(yaml.safe_load((DATA / "custom-resources.yaml").read_text())))
    tried = [said for _, _, said in BROKEN] + ["KubeRay expects a name that Services"]
    assert {each for each in known if not any(said in each for said in tried)} == set()


def check_crd(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, ROOT / "scripts" / "check-crd.py", *arguments]
    result = subprocess.run([str(each) for each in command], check=False, capture_output=True, text=True, cwd=ROOT)
    return result.returncode, (result.stdout + result.stderr).strip()


@pytest.mark.slow
def test_the_script_checks_examples_and_given_values(tmp_path: Path) -> None:
    status, said = check_crd(DATA / "custom-resources.yaml")
    assert (status, said.partition(" ")[2].partition(":")[0]) == (0, "values files are valid")
    assert said.endswith("Certificate, GRPCRoute, HTTPRoute, PodMonitor, PrometheusRule, RayCluster, ScaledObject")

    version = {"type": "string", RULES: [{"rule": "self == oldSelf", "message": "rayVersion is immutable"}]}
    any_other = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {**any_other, "properties": {"rayVersion": version}}
    versions = [{"name": "v1", "schema": {"openAPIV3Schema": {**any_other, "properties": {"spec": spec}}}}]
    crd = {
        "kind": "CustomResourceDefinition",
        "spec": {"group": "ray.io", "names": {"kind": "RayCluster"}, "versions": versions},
    }
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(crd))
    (tmp_path / "old.yaml").write_text("{}")
    (tmp_path / "new.yaml").write_text("ray: {version: 2.61.0}")
    assert check_crd(tmp_path / "crd.yaml", tmp_path / "new.yaml")[0] == 0
    status, said = check_crd(tmp_path / "crd.yaml", tmp_path / "new.yaml", "--from", tmp_path / "old.yaml")
    assert (status, said) == (1, "new.yaml: RayCluster test-tandem: spec.rayVersion: rayVersion is immutable")


def test_the_script_names_what_is_no_definition() -> None:
    status, said = check_crd(ROOT / "helm" / "tandem" / "values.yaml")
    assert status == 1
    assert said.endswith(
        "values.yaml: expected CustomResourceDefinitions, got none; kubectl get crd -o yaml prints them"
    )
