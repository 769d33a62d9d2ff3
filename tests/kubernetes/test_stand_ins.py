"""What the tests of a cluster write in place of controllers."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from cluster.testing.chart_edits import rendered
from tests.kubernetes.stand_ins import budget_status, finished, lost, needed, pod, pod_templates
from tests.unit.deploy.test_chart_objects import NEWEST
from tests.unit.deploy.test_crd import ROUTES

RELEASE = [dict(each) for each in rendered(ROUTES).values()]


@pytest.mark.parametrize(
    ("most", "healthy", "allowed", "wanted"), [(1, 2, 1, 1), (1, 1, 0, 1), (0, 2, 0, 2), (3, 2, 2, 0)]
)
def test_the_status_of_a_budget_for_two_pods(most: int, healthy: int, allowed: int, wanted: int) -> None:
    (budget,) = (
        each
        for each in RELEASE
        if each["metadata"]["name"] == "test-tandem-router" and "maxUnavailable" in each["spec"]
    )
    spec = {**budget["spec"], "maxUnavailable": most}
    made = {**budget, "metadata": {**budget["metadata"], "generation": 3}, "spec": spec}
    status = budget_status(made, healthy=healthy, expected=2)
    kubernetes_validate.validate({**made, "status": status}, NEWEST, strict=True)
    assert (status["disruptionsAllowed"], status["desiredHealthy"], status["observedGeneration"]) == (
        allowed,
        wanted,
        3,
    )
    assert [each["status"] for each in status["conditions"]] == [str(allowed > 0)]


def test_the_status_of_a_finished_job() -> None:
    (job,) = (each for each in RELEASE if each["kind"] == "Job")
    status = finished(job)
    kubernetes_validate.validate({**job, "status": status}, NEWEST, strict=True)
    assert [each["type"] for each in status["conditions"]] == ["SuccessCriteriaMet", "Complete"]


def test_every_template_becomes_a_pod_and_names_what_it_needs() -> None:
    templates = pod_templates(RELEASE)
    assert {name.removeprefix("test-tandem-")[:4] for name in templates} == {
        "head",
        "node",
        "rout",
        "valk",
        "roll",
        "test",
    }
    for name, template in templates.items():
        kubernetes_validate.validate(pod(name, template), NEWEST, strict=True)
    assert pod("a", templates["test-tandem-router"])["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
    names = {(each["kind"], each["metadata"]["name"]) for each in needed(RELEASE)}
    assert {("Secret", "tandem-keys"), ("Secret", "test-tandem-router-tls"), ("ConfigMap", "kube-root-ca.crt")} <= names
    assert ("ConfigMap", "test-tandem") not in names, "the release makes it"


@pytest.mark.parametrize(
    ("written", "read", "paths"),
    [
        ({"a": "0.5", "b": {"c": [1]}}, {"a": "500m", "b": {"c": [1]}, "d": 1}, []),
        ({"a": "", "b": [], "c": {"d": False}}, {"c": {}}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, [".a.c"]),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {}]}, [".a[1].b"]),
        ({"a": [1, 2]}, {"a": [1]}, [".a"]),
    ],
)
def test_a_field_that_the_api_server_dropped_is_found(written: Any, read: Any, paths: list[str]) -> None:
    assert list(lost(written, read)) == paths
