"""Which pods a changed value replaces: docs/deploy.md has the table, and these tests what it stands on."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from cluster.testing.chart_edits import (
    BASES,
    EDITS,
    GROUP,
    IN_HEAD,
    OTHER_GROUP,
    RECREATE,
    ROLLING,
    SCALED,
    Edit,
    cell,
    outcome_of,
    rendered,
)
from cluster.testing.kuberay import Manifests, Namespace, outcome, secret_outcome, spec_hash
from tests.unit.deploy.conftest import CHART

Change = Callable[[dict[str, Any]], object]


def ray_spec(base: str = RECREATE, more: str = GROUP) -> dict[str, Any]:
    spec: dict[str, Any] = copy.deepcopy(rendered(f"{BASES[base]},{more}")["RayCluster", "test-tandem"]["spec"])
    return spec


def with_ray_spec(change: Change, base: str, more: str = GROUP) -> tuple[Manifests, Manifests]:
    """A release, and the same with a RayCluster that the chart did not write."""
    before = rendered(f"{BASES[base]},{more}")
    after = copy.deepcopy(dict(before))
    change(after["RayCluster", "test-tandem"]["spec"])
    return before, after


def tolerate(spec: dict[str, Any]) -> None:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        group["template"]["spec"]["tolerations"] = [{"key": "a"}]


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["workerGroupSpecs"][0].update(replicas=7),
        lambda spec: spec["workerGroupSpecs"][1].update(minReplicas=1, maxReplicas=7),
        lambda spec: spec["workerGroupSpecs"][0].update(scaleStrategy={"workersToDelete": ["a"]}),
        tolerate,
        lambda spec: spec["headGroupSpec"]["template"]["spec"].update(schedulingGates=[{"name": "a"}]),
        lambda spec: spec.update(upgradeStrategy={"type": "None"}),
    ],
    ids=["replicas", "limits", "workersToDelete", "tolerations", "schedulingGates", "upgradeStrategy"],
)
def test_kuberay_overlooks_what_autoscalers_and_queues_change(change: Change) -> None:
    spec = ray_spec()
    spec["workerGroupSpecs"][0]["scaleStrategy"] = {}
    before = copy.deepcopy(spec)
    change(spec)
    assert spec != before
    assert spec_hash(spec) == spec_hash(before)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(rayVersion="9"),
        lambda spec: spec["headGroupSpec"]["template"]["metadata"]["labels"].update(a="b"),
        lambda spec: spec["workerGroupSpecs"][1]["template"]["spec"]["containers"][0].update(image="a"),
        lambda spec: spec["workerGroupSpecs"][0]["rayStartParams"].update(a="b"),
        lambda spec: spec["workerGroupSpecs"].append(copy.deepcopy(spec["workerGroupSpecs"][0])),
        lambda spec: spec["workerGroupSpecs"].pop(),
    ],
    ids=["version", "label", "image", "parameter", "group", "removed group"],
)
def test_kuberay_makes_all_pods_anew_for_any_other_change_with_recreate_and_none_without(change: Change) -> None:
    found = outcome(*with_ray_spec(change, RECREATE))
    assert {"head", "nodes"} <= found.replaced
    assert "router" not in found.replaced
    without = outcome(*with_ray_spec(change, ROLLING))  # the Job is the former
    assert not without.replaced
    assert not without.removed


def test_tolerations_alone_never_reach_a_pod_unless_the_chart_shows_the_change() -> None:
    for base in (RECREATE, ROLLING):
        found = outcome(*with_ray_spec(tolerate, base))
        assert not found.replaced
        assert found.unreached == {"head", "nodes", "a"}
    edit = Edit("", ("node.tolerations[0].key=a,head.tolerations[0].key=a",), GROUP)
    for base in (RECREATE, ROLLING):
        found = outcome_of(edit, base, 0)
        assert found.replaced == {"head", "nodes", "a"}
        assert not found.unreached


def test_a_removed_group_keeps_its_pods_until_the_job_deletes_them() -> None:
    def remove(spec: dict[str, Any]) -> None:
        assert spec["workerGroupSpecs"].pop()["groupName"] == "b"

    two = f"{GROUP},{OTHER_GROUP}"
    assert outcome(*with_ray_spec(remove, ROLLING, two)).removed == set()
    assert outcome(rendered(f"{BASES[ROLLING]},{two}"), rendered(f"{BASES[ROLLING]},{GROUP}")).removed == {"b"}


def test_going_back_to_recreate_makes_all_pods_anew_if_the_head_is_of_an_earlier_spec() -> None:
    async def replaced(*settings: str) -> set[str]:
        namespace = Namespace()
        for each in settings[:-1]:
            await namespace.apply(rendered(each))
        before = set(namespace.pods)
        await namespace.apply(rendered(settings[-1]))
        return {uid.partition("-")[0] for uid in before - namespace.pods.keys()}

    nodes = "node.pod.env[0].name=A"
    rolling, recreate = BASES[ROLLING], f"{BASES[ROLLING]},upgrade.strategy=recreate"
    assert asyncio.run(replaced(rolling, f"{rolling},{nodes}")) == {"node/nodes"}
    assert asyncio.run(replaced(rolling, f"{rolling},{nodes}", f"{recreate},{nodes}")) == {"head", "node/nodes"}
    assert asyncio.run(replaced(rolling, recreate)) == set()
    assert asyncio.run(replaced(recreate, rolling)) == set()


def test_one_pod_is_replaced_after_another_by_the_job_and_all_at_once_by_kuberay() -> None:
    """Seen from the model: how many of Ray's pods are left at the worst moment."""

    class Watched(Namespace):
        least = 99

        def _remove(self, which: Any) -> None:
            super()._remove(which)
            self.least = min(self.least, sum(each.owner == "test-tandem" for each in self.pods.values()))

    async def least(base: str) -> int:
        namespace = Watched()
        await namespace.apply(rendered(BASES[base]))
        namespace.least = 99
        await namespace.apply(rendered(f"{BASES[base]},image.tag=v9"))
        return namespace.least

    assert asyncio.run(least(RECREATE)) == 0
    assert asyncio.run(least(ROLLING)) == 2, "of a head and two nodes"


ISSUED_BY_CSI = "tls.internal.certManager.csi=true"


@pytest.mark.parametrize(
    "setting",
    [
        "image.tag=v9",
        "global.imageRegistry=r.example.com",
        "imagePullSecrets[0].name=a",
        "podAnnotations.a=b",
        "podSecurityContext.runAsUser=7",
        "securityContext.readOnlyRootFilesystem=false",
        "tls.internal.certManager.enabled=false,tls.internal.existingSecret=a",
        ISSUED_BY_CSI,
        *(f"{ISSUED_BY_CSI},{each}" for each in ("tls.internal.certManager.duration=24h", "cluster.name=a")),
        "head.nodeSelector.a=b",
        "head.tolerations[0].key=a",
        "node.onHead=true,node.nodeSelector.a=b",
    ],
)
def test_what_the_page_says_replaces_the_adapters_pod_does(setting: str) -> None:
    given = next((each for each in (ISSUED_BY_CSI, "node.onHead=true") if setting.startswith(f"{each},")), "")
    before = ",".join(each for each in (BASES[RECREATE], SCALED, given) if each)
    assert "scale" in outcome(rendered(before), rendered(f"{before},{setting}")).replaced


LIVE = [(edit, base) for edit in EDITS if edit.is_live for base in edit.bases]


def restarts_nothing(edit: Edit, base: str, number: int) -> None:
    found = outcome_of(edit, base, number)
    assert found.restarted == 0
    assert not (found.replaced | found.added | found.removed | found.unreached)
    assert not found.refused, "the head would log that it cannot apply these"


@pytest.mark.parametrize(("edit", "base"), LIVE, ids=str)
def test_a_live_edit_restarts_no_pod(edit: Edit, base: str) -> None:
    """`k8s.live_edit_restarted_pods`: 0 for log level, pool sizes, limits, classes, keys and routes."""
    restarts_nothing(edit, base, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("edit", "base"), LIVE, ids=str)
def test_no_setting_of_a_live_edit_restarts_a_pod(edit: Edit, base: str) -> None:
    for number in range(1, len(edit.settings or edit.secrets)):
        restarts_nothing(edit, base, number)


def test_the_figure_counts_pods_that_restart() -> None:
    assert outcome_of(Edit("", ("cluster.transfer.digests=false",)), RECREATE, 0).restarted == 3
    assert outcome_of(Edit("", ("cluster.transfer.digests=false",)), ROLLING, 0).restarted == 1


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_all_settings_of_a_row_do_the_same(edit: Edit) -> None:
    """And the running head can apply what reaches it."""
    for base in edit.bases:
        found = [outcome_of(edit, base, number) for number in range(len(edit.settings or edit.secrets))]
        assert len({cell(each) for each in found}) == 1
        assert not [each.refused for each in found if each.refused]


def test_the_table_has_each_kind_of_edit_and_says_what_reaches_no_running_pod() -> None:
    page = (CHART.parents[1] / "docs" / "deploy.md").read_text()
    table = page.partition("<!-- edits: written")[2].partition("<!-- edits end -->")[0]
    stale = [line.split(" | ")[0] for line in table.splitlines() if "new pods only" in line]
    assert len(stale) == 4
    assert all("`ray" in title or "Secrets" in title for title in stale)
    assert not [edit.title for edit in EDITS if edit.title not in table]


def test_a_secret_that_no_pod_reads_is_a_mistake_and_a_variable_is_not_renewed() -> None:
    manifests = rendered(BASES[IN_HEAD])
    with pytest.raises(ValueError, match="no pod uses such a Secret"):
        secret_outcome(manifests, "nothing")
    assert secret_outcome(manifests, "tandem-valkey").unreached == {"head", "valkey"}
    by_path = copy.deepcopy(dict(manifests))
    spec: Any = by_path["RayCluster", "test-tandem"]["spec"]
    (keys,) = (
        mount
        for mount in spec["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        if mount["name"] == "keys"
    )
    keys["subPath"] = "keys.yaml"
    assert secret_outcome(manifests, "tandem-keys").unreached == set()
    assert secret_outcome(by_path, "tandem-keys").unreached == {"head"}


UNCHANGED_BY_A_ROW = {
    "nameOverride", "fullnameOverride",  # names of all objects: another release
    "gateway.inferencePool",  # as the rest of gateway; it cannot be with the example's TLS and keys
    "node.rdma",  # as node.gpuResource; it cannot be with the example's TLS
}  # fmt: skip
OF_KUBERNETES = {"podSecurityContext", "securityContext"}  # as a whole


def test_every_value_of_the_chart_is_in_a_row() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    with_parts = {name for name, value in values.items() if value and isinstance(value, dict)} - OF_KUBERNETES
    paths = {f"{name}.{key}" for name in with_parts for key in values[name]} | values.keys() - with_parts
    edited = ",".join(setting for edit in EDITS for setting in edit.settings)
    missing = {path for path in paths if not re.search(rf"(^|,){re.escape(path)}[.\[=]", edited)}
    assert missing == UNCHANGED_BY_A_ROW
